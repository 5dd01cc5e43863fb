"""A job that moves, but waits for one rank. Pure and torch-free.

Whoever comes last to a collective waits least in it. So each rank's own clock tells who was late; clocks are never
compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import sub
from typing import Final, NamedTuple

from disttrain.flight_recorder.match import Match, Meeting
from disttrain.flight_recorder.record import State
from disttrain.flight_recorder.verdict import Kind, Verdict

SYNCHRONIZING: Final = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier"}
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
    delays = [
        delay for meetings in found.meetings.values() for meeting in meetings.values() if (delay := _delay(meeting))
    ]
    num_meetings = len(delays)
    num_late = Counter(delay.late_rank for delay in delays)
    lost_s: defaultdict[int, float] = defaultdict(float)
    counted_until_s: defaultdict[int, float] = defaultdict(float)
    for delay in sorted(delays, key=lambda delay: delay.ended_s):
        # Collectives may be under way together: no second of a rank is lost twice.
        waiter, fresh_s = delay.waiting_rank, delay.ended_s - max(delay.began_s, counted_until_s[delay.waiting_rank])
        lost_s[delay.late_rank] += max(0.0, min(fresh_s, delay.lost_s))
        counted_until_s[waiter] = max(counted_until_s[waiter], delay.ended_s)
    if num_meetings < _MIN_MEETINGS:
        return []
    rank, rank_lost_s = max(lost_s.items(), key=lambda item: item[1])
    recorded = [dump.records for dump in found.dumps.values() if dump.records]
    span_s = max(records[-1].enqueued_s - records[0].enqueued_s for records in recorded)
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


class _Delay(NamedTuple):
    """Of one collective: who came last, who waited longest and when, by its own clock, and for how long in vain."""

    late_rank: int
    waiting_rank: int
    began_s: float
    ended_s: float
    lost_s: float


def _delay(meeting: Meeting) -> _Delay | None:
    """None where it does not tell who was late."""
    if not len(meeting.records) == len(meeting.ranks) > 1:
        return None
    sites, _, states, began_s, ended_s, *_ = zip(*meeting.records.values(), strict=True)
    if states.count(State.COMPLETED) < len(states) or None in ended_s:
        return None
    if any(site.operation not in SYNCHRONIZING for site in {id(site): site for site in sites}.values()):
        return None
    waits_s = list(map(sub, ended_s, began_s))
    least, most = waits_s.index(min(waits_s)), waits_s.index(max(waits_s))
    ranks = list(meeting.records)
    return _Delay(ranks[least], ranks[most], began_s[most], ended_s[most], waits_s[most] - waits_s[least])
