"""Dependencies of actions: what each waits for, and the messages that carry its result on. Passes, checks and players
ask here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from disttrain.pipelining.schedule.action import INPUT_GRADIENTS, Action, Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule, Wiring

_SENT = {Op.SEND_F: Op.FORWARD, Op.SEND_B: Op.BACKWARD_INPUT}


def inputs_of(schedule: Schedule, part: Action, *, by_message: bool) -> Iterator[Action]:
    """Computations and receives that must be over before `part` begins. An I stands for a B as well.

    `by_message`: what another rank computes is received; otherwise that rank's computation is named.
    """
    stage, microbatch = part.stage, part.microbatch
    if part.op is Op.FORWARD:
        yield from _handed_on(schedule, part, schedule.sources[stage], Op.FORWARD, Op.RECV_F, by_message)
    elif part.op in INPUT_GRADIENTS:
        yield Action(Op.FORWARD, stage, microbatch)
        yield from _handed_on(schedule, part, schedule.targets[stage], Op.BACKWARD_INPUT, Op.RECV_B, by_message)
    elif part.op is Op.BACKWARD_WEIGHT:
        yield Action(Op.BACKWARD_INPUT, stage, microbatch)
    elif part.op in _SENT:
        yield Action(_SENT[part.op], stage, microbatch)


def _handed_on(
    schedule: Schedule, part: Action, others: tuple[int, ...], computed: Op, received: Op, by_message: bool
) -> Iterator[Action]:
    home = schedule.placement.ranks
    for other in others:
        if by_message and home[other] != home[part.stage]:
            yield Action(received, part.stage, part.microbatch, other)
        else:
            yield Action(computed, other, part.microbatch)


def sends_of(schedule: Schedule, part: Action) -> Iterator[Action]:
    """Messages that bring the result of `part` to stages on other ranks."""
    if part.op is Op.FORWARD:
        send, others = Op.SEND_F, schedule.targets[part.stage]
    elif part.op in INPUT_GRADIENTS:
        send, others = Op.SEND_B, schedule.sources[part.stage]
    else:
        return
    for other in schedule.elsewhere(part.stage, others):
        yield Action(send, part.stage, part.microbatch, other)


def as_input(part: Action) -> Action:
    """The name that `inputs_of` has for this computation."""
    return part._replace(op=Op.BACKWARD_INPUT) if part.op is Op.BACKWARD else part


ByStage = tuple[tuple[Action, ...], ...]


@lru_cache(maxsize=64)
def dependencies(placement: Placement, wiring: Wiring) -> dict[Op, tuple[ByStage, ByStage]]:
    """Returns `inputs_of`, by message, and `sends_of` each kind of computation and each stage, without the microbatch.

    They are the same in all schedules with this placement and wiring.
    """
    schedule = Schedule("", placement, 1, ((),) * placement.num_ranks, wiring)
    tables = {}
    for kind in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD):
        parts = [Action(kind, stage) for stage in range(placement.num_stages)]
        inputs = tuple(tuple(inputs_of(schedule, part, by_message=True)) for part in parts)
        tables[kind] = inputs, tuple(tuple(sends_of(schedule, part)) for part in parts)
    return tables
