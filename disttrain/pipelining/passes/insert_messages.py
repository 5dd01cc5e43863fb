"""Sends and receives for all that goes from rank to rank: activations, gradients, skip edges, tied gradients.

A simulation of the computations says when each output is ready. Its send is placed right after the computation, and its
receive where the other rank is at that time. Both ranks sort their messages by that time, so they have one order. And
since all lists follow one clock, no ranks wait in a circle, even if sends wait for receives.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.action import WEIGHT_GRADIENTS, Action, Op
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.dependencies import dependencies
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedule.simulator import simulate
from disttrain.pipelining.schedule.timeline import Timeline


class _Message(NamedTuple):
    """`order` is as both ends list them. Of what is ready at once the neighbour's comes first: others wait for it."""

    ready_s: float
    order: tuple[int, int]
    send: Action


def insert_messages(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The schedule with its messages. `costs` are the times that their order is chosen by.

    Raises: ScheduleError when there are messages already, when the computations cannot come to their end, or when one
            takes no time.
    """
    if schedule.has_messages:
        raise ScheduleError(
            "pipelining.insert_messages",
            f"{schedule.name} has messages already.",
            "Begin with its computations only, as schedule.compute_only() returns them.",
        )
    timeline = simulate(schedule, costs)
    if instant := [span.action for spans in timeline.compute for span in spans if span.start_s >= span.end_s]:
        raise ScheduleError(
            "pipelining.insert_messages",
            f"{instant[0]} takes no time, so nobody can tell what comes first.",
            "Give each computation a time above 0.",
        )
    home = schedule.placement.ranks
    # Of each rank, its messages by the computation before which they stand.
    slots: list[dict[int, list[Action]]] = [{} for _ in schedule.ranks]
    starts = [[span.start_s for span in spans] for spans in timeline.compute]
    for message in sorted(_messages(schedule, timeline)):
        for end in (message.send, message.send.other_end):
            rank = home[end.stage]
            slot = bisect.bisect_left(starts[rank], message.ready_s)
            slots[rank].setdefault(slot, []).append(end)
    return schedule.with_ranks([_insert(schedule, rank, rank_slots, timeline) for rank, rank_slots in enumerate(slots)])


def _messages(schedule: Schedule, timeline: Timeline) -> Iterator[_Message]:
    complete_s = [0.0] * schedule.num_stages
    sends = {kind: of_stages for kind, (_, of_stages) in dependencies(schedule.placement, schedule.wiring).items()}
    for spans in timeline.compute:
        for span in spans:
            for part in span.action.parts:
                if part.op in WEIGHT_GRADIENTS:
                    complete_s[part.stage] = span.end_s
                for op, stage, _, peer, _ in sends[part.op][part.stage]:
                    yield _message(span.end_s, Action(op, stage, part.microbatch, peer))
    home = schedule.placement.ranks
    for stage, peer in schedule.wiring.tied_pairs if schedule.has_backward else ():
        if home[stage] != home[peer]:
            # Not before the receiver has its own gradient: until then a buffer for the other's would be unused.
            yield _message(max(complete_s[stage], complete_s[peer]), Action(Op.SEND_TIED, stage, None, peer))


def _message(ready_s: float, send: Action) -> _Message:
    assert send.peer is not None
    return _Message(ready_s, (send.stage, abs(send.stage - send.peer)), send)


def _insert(schedule: Schedule, rank: int, slots: dict[int, list[Action]], timeline: Timeline) -> list[Action]:
    """Other actions stay where they are, between the computation that they follow and the messages after it."""
    result: list[Action] = []
    num_computed = 0
    computed = [span.action for span in timeline.compute[rank]]
    for action in schedule.ranks[rank]:
        if num_computed < len(computed) and action is computed[num_computed]:
            result += slots.get(num_computed, ())
            num_computed += 1
        result.append(action)
    return result + slots.get(num_computed, [])
