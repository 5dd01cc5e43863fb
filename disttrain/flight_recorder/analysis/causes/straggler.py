"""Finds the rank that others wait for in a job that moves. Pure and torch-free.

In the same time, each rank waits and works between its waits. The rank that works longer than any other is the one that
all wait for, in collectives and in pipelines, where ranks wait for messages also when none is late. Each rank's own
clock measures its part; clocks are never compared. On GPUs the devices' times are used.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Final

from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.record.columns import Records

_MIN_RECORDS: Final = 8
_MIN_MORE_S: Final = 1.0
"""By how much it must work longer than any other; less may come from the machine, or the start."""
_MIN_SHARE: Final = 0.2
"""Of the recorded time."""
_NUM_PAUSES: Final = 2
"""Pauses that any rank may make, for a save or a connection, without being a straggler."""


def find_straggler(matched: Match) -> list[Verdict]:
    """Finds the rank that works a fifth of the time longer than any other, and a second at least; at most one
    verdict."""
    records = matched.records
    if not 1 < matched.world_size == len(records) or min(map(len, records.values())) < _MIN_RECORDS:
        return []
    # Of a rank whose device is not known only the host's time is there, which is no measure beside devices'.
    if len({rank_records.devices is not None for rank_records in records.values()}) > 1:
        return []
    spans_s = {rank: rank_records[-1].times_s[0] - rank_records[0].times_s[0] for rank, rank_records in records.items()}
    work_s = {rank: _work_s(rank_records) for rank, rank_records in records.items()}
    # Full rings of different ranks reach back to different times.
    shares = {rank: work_s[rank] / max(spans_s[rank], _MIN_MORE_S) for rank in records}
    *_, second, rank = sorted(shares, key=shares.__getitem__)
    more = shares[rank] - shares[second]
    if more < _MIN_SHARE or more * spans_s[rank] < _MIN_MORE_S:
        return []
    summary = f"The job moves, but waits for rank {rank}: it works {more:.0%} of the time longer than any other."
    others = ", ".join(f"rank {other} {shares[other]:.0%}" for other in sorted(shares)[:8])
    evidence = f"between its waits, without its {_NUM_PAUSES} longest pauses, rank {rank} worked {work_s[rank]:.2f} s "
    evidence += f"of {spans_s[rank]:.2f} s on record; of their time worked {others}"
    return [Verdict(Kind.STRAGGLER, (rank,), summary, (evidence,))]


def _work_s(records: Records) -> float:
    """Seconds between a rank's waits, without its longest pauses."""
    waits = sorted(records.waits())
    if not waits:
        return 0.0
    began_s, ended_s = zip(*waits, strict=True)
    pauses_s: Iterable[float] = map(operator.sub, began_s[1:], itertools.accumulate(ended_s, max))
    return sum(sorted(filter((0.0).__lt__, pauses_s))[:-_NUM_PAUSES])
