"""A job of messages, such as a pipeline, that waits for one rank. Pure and torch-free.

There ranks wait also where none is late: until the first microbatch comes, and for the last one's gradients. What tells
a slow stage is that it works for longer than any other does, between its waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from disttrain.flight_recorder.match import Match
from disttrain.flight_recorder.record import Record
from disttrain.flight_recorder.verdict import Kind, Verdict

_MIN_MESSAGES: Final = 8
_MIN_MORE_S: Final = 1.0
"""That it works for longer than any other; less may be the machine's doing."""
_MIN_SHARE: Final = 0.2
"""Of the recorded time."""
_NUM_PAUSES: Final = 2
"""That any rank may make, for a save or a connection, and be no straggler."""


def find_busiest(found: Match) -> list[Verdict]:
    """At most one verdict: of the rank that works for a fifth of the time longer than any other, and a second at
    least."""
    num_taken = sum(message.receive is not None and message.send is not None for message in found.messages.values())
    if num_taken < _MIN_MESSAGES or len(found.dumps) < found.world_size or found.world_size < 2:
        return []
    spans_s, work_s = {}, {}
    for rank, dump in found.dumps.items():
        spans_s[rank] = dump.records[-1].times_s[0] - dump.records[0].times_s[0] if dump.records else 0.0
        work_s[rank] = sum(sorted(_work_s(dump.records))[:-_NUM_PAUSES])
    *_, second, rank = sorted(work_s, key=work_s.__getitem__)
    more_s, span_s = work_s[rank] - work_s[second], max(spans_s.values())
    if more_s < _MIN_MORE_S or more_s < _MIN_SHARE * span_s:
        return []
    summary = f"The job moves, but waits for rank {rank}, which works {more_s / span_s:.0%} of the time longer than "
    summary += "any other."
    others = ", ".join(f"rank {other} {time_s:.2f} s" for other, time_s in sorted(work_s.items())[:8])
    evidence = f"between its waits, without its {_NUM_PAUSES} longest pauses, of {span_s:.2f} s on record: {others}"
    return [Verdict(Kind.STRAGGLER, (rank,), summary, (evidence,))]


def _work_s(records: Sequence[Record]) -> list[float]:
    """Seconds between a rank's waits, one after the other."""
    waits = sorted(
        (began_s if record.waits_s is None else max(record.waits_s, began_s), ended_s)
        for record in records
        for began_s, ended_s in [record.times_s]
        if ended_s is not None
    )
    work_s = []
    free_s = waits[0][1] if waits else 0.0
    for began_s, ended_s in waits[1:]:
        work_s.append(max(0.0, began_s - free_s))
        free_s = max(free_s, ended_s)
    return work_s
