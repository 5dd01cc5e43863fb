"""A job that moves, but waits for one rank. Pure and torch-free.

Whoever comes last to a collective waits least in it. So each rank's own clock tells who was late; clocks are never
compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter, sub
from typing import Final, NamedTuple

from disttrain.flight_recorder.match import Match, Meeting
from disttrain.flight_recorder.record import Record, State
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
_MIN_TOLD_S: Final = 0.01
"""Of a delay, for it to be asked whose fault it is."""
_NUM_PAUSES: Final = 2
"""That any rank may make, for a save or a connection, and be no straggler."""


def find_straggler(found: Match) -> list[Verdict]:
    """At most one verdict: the rank for which the others wait a fifth of the time or more, and a second at least."""
    delays = [
        delay for meetings in found.meetings.values() for meeting in meetings.values() if (delay := _delay(meeting))
    ]
    if len(delays) < _MIN_MEETINGS:
        return []
    lost_s: defaultdict[int, list[float]] = defaultdict(list)
    counted_until_s: defaultdict[int, float] = defaultdict(float)
    to_blame = _Blame(delays)
    for delay in sorted(delays, key=lambda delay: delay.ended_s):
        # Collectives may be under way together: no second of a rank is lost twice.
        waiter, fresh_s = delay.waiting_rank, delay.ended_s - max(delay.began_s, counted_until_s[delay.waiting_rank])
        lost_s[to_blame.of(delay)].append(max(0.0, min(fresh_s, delay.lost_s)))
        counted_until_s[waiter] = max(counted_until_s[waiter], delay.ended_s)
    rank, losses_s = max(lost_s.items(), key=lambda item: sum(item[1]))
    rank_lost_s = sum(losses_s)
    recorded = [dump.records for dump in found.dumps.values() if dump.records]
    span_s = max(records[-1].times_s[0] - records[0].times_s[0] for records in recorded)
    if (
        rank_lost_s - sum(sorted(losses_s)[-_NUM_PAUSES:]) < _MIN_LOST_S
        or rank_lost_s < _MIN_SHARE * span_s
        or rank_lost_s < _MIN_BLAME * sum(map(sum, lost_s.values()))
    ):
        return []
    summary = f"The job moves, but waits for rank {rank} {min(1.0, rank_lost_s / span_s):.0%} of the time."
    evidence = f"rank {rank} held up {len(losses_s)} of {len(delays)} collectives; the others waited "
    evidence += f"{rank_lost_s:.2f} s for it, of {span_s:.2f} s on record"
    return [Verdict(Kind.STRAGGLER, (rank,), summary, (evidence,))]


class _Delay(NamedTuple):
    """Of one collective: who came last, who waited longest and when, by its own clock, and for how long in vain."""

    late_rank: int
    waiting_rank: int
    began_s: float
    ended_s: float
    lost_s: float
    meeting: Meeting


class _Blame:
    """Who is at fault where a rank is late because it has waited itself, in another group."""

    def __init__(self, delays: Sequence[_Delay]) -> None:
        self._waits: defaultdict[int, list[tuple[float, float, int, float]]] = defaultdict(list)
        """Of each rank: when a wait ended, how much of it was lost, for whom, and when that one came, by its clock."""
        for delay in delays:
            if delay.lost_s >= _MIN_TOLD_S:
                records = delay.meeting.records
                last = records[delay.late_rank]
                for rank, record in records.items():
                    came_s, left_s = record.times_s
                    if rank != delay.late_rank and left_s is not None:
                        lost_s = left_s - came_s - _wait_s(last)
                        self._waits[rank].append((left_s, lost_s, delay.late_rank, last.times_s[0]))
        for waits in self._waits.values():
            waits.sort()

    def of(self, delay: _Delay) -> int:
        """The rank that came last, or whom it has waited for, for half as long or more, just before."""
        rank, came_s, lost_s = delay.late_rank, delay.meeting.records[delay.late_rank].times_s[0], delay.lost_s
        passed = {rank}
        while lost_s >= _MIN_TOLD_S:
            waits = self._waits[rank]
            place = bisect_right(waits, came_s, key=itemgetter(0)) - 1
            if place < 0:
                break
            ended_s, own_lost_s, other, other_came_s = waits[place]
            if ended_s < came_s - lost_s or own_lost_s < lost_s / 2 or other in passed:
                break
            passed.add(other)
            rank, came_s, lost_s = other, other_came_s, own_lost_s
        return rank


def _delay(meeting: Meeting) -> _Delay | None:
    """None where it does not tell who was late."""
    if not len(meeting.records) == len(meeting.ranks) > 1:
        return None
    sites, _, states, began_s, ended_s, _, _, _, devices, _ = zip(*meeting.records.values(), strict=True)
    if all(devices):  # Who is late there is known of the devices alone: hosts don't wait.
        began_s, ended_s = zip(*devices, strict=True)
    if states.count(State.COMPLETED) < len(states) or None in ended_s or (any(devices) and not all(devices)):
        return None
    if any(site.operation not in SYNCHRONIZING for site in {id(site): site for site in sites}.values()):
        return None
    waits_s = list(map(sub, ended_s, began_s))
    least, most = waits_s.index(min(waits_s)), waits_s.index(max(waits_s))
    ranks = list(meeting.records)
    lost_s = waits_s[most] - waits_s[least]
    return _Delay(ranks[least], ranks[most], began_s[most], ended_s[most], lost_s, meeting)


def _wait_s(record: Record) -> float:
    came_s, left_s = record.times_s
    return (left_s or came_s) - came_s
