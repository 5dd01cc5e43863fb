"""A job that moves, but waits for one rank. Pure and torch-free.

Whoever comes last to a collective waits least in it. So each rank's own clock tells who was late; clocks are never
compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from disttrain.flight_recorder.match import Match, Meeting
from disttrain.flight_recorder.record import State
from disttrain.flight_recorder.verdict import Kind, Verdict
from disttrain.flight_recorder.wording import waited_s

_SYNCHRONIZING: Final = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier"}
"""Operations that nobody leaves before all have come."""

_MIN_MEETINGS: Final = 8
_MIN_LOST_S: Final = 1.0
"""That are lost in waiting for one rank; less may be the machine's doing, or the start's."""
_MIN_SHARE: Final = 0.2
"""Of the recorded time, that is lost in waiting for one rank."""
_MIN_BLAME: Final = 0.6
"""Of all time that is lost in waiting, by the fault of one rank."""


def find_straggler(found: Match) -> list[Verdict]:
    """At most one verdict: the rank for which the others wait a fifth of the time or more, and a second at least."""
    lost_s: defaultdict[int, float] = defaultdict(float)
    num_late: Counter[int] = Counter()
    num_meetings = 0
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    for meetings in found.meetings.values():
        for meeting in meetings.values():
            if not _is_telling(meeting):
                continue
            num_meetings += 1
            waits = {rank: waited_s(found.dumps[rank], record) for rank, record in meeting.records.items()}
            late_rank = min(waits, key=waits.__getitem__)
            lost_s[late_rank] += max(waits.values()) - waits[late_rank]
            num_late[late_rank] += 1
            for rank, record in meeting.records.items():
                first_s[rank] = min(first_s.get(rank, record.enqueued_s), record.enqueued_s)
                last_s[rank] = max(last_s.get(rank, record.enqueued_s), record.completed_s or record.enqueued_s)
    if num_meetings < _MIN_MEETINGS:
        return []
    rank, rank_lost_s = max(lost_s.items(), key=lambda item: item[1])
    span_s = max(last_s[rank] - first_s[rank] for rank in first_s)
    if (
        rank_lost_s < _MIN_LOST_S
        or rank_lost_s < _MIN_SHARE * span_s
        or rank_lost_s < _MIN_BLAME * sum(lost_s.values())
    ):
        return []
    summary = f"The job moves, but waits for rank {rank} {rank_lost_s / span_s:.0%} of the time."
    evidence = f"rank {rank} came last to {num_late[rank]} of {num_meetings} collectives; the others waited "
    evidence += f"{rank_lost_s:.2f} s for it, of {span_s:.2f} s on record"
    return [Verdict(Kind.STRAGGLER, (rank,), summary, (evidence,))]


def _is_telling(meeting: Meeting) -> bool:
    records = meeting.records
    return len(records) == len(meeting.ranks) > 1 and all(
        record.state is State.COMPLETED and record.site.operation in _SYNCHRONIZING for record in records.values()
    )
