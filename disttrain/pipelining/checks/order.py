"""On its own rank, each action comes after what it uses: F before I before W, a message sent after it was computed and
received before it is used, one stage after the other where both lie on one rank."""

from __future__ import annotations

from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import INPUT_GRADIENTS, Action, Op
from disttrain.pipelining.schedule.schedule import Schedule


def check_order(schedule: Schedule) -> Iterator[Problem]:
    for rank, actions in enumerate(schedule.ranks):
        done: set[Action] = set()
        for position, action in enumerate(actions):
            for part in action.parts:
                for needed in _needed_here(schedule, part):
                    if needed not in done:
                        yield Problem(
                            f"{action} comes before {needed}, which it uses.", "Exchange them.", rank, position
                        )
            # Children of an OVERLAP run at the same time: none may use what another computes.
            done.update(_as_done(part) for part in action.parts)


def _as_done(part: Action) -> Action:
    """A B has done what an I does."""
    return part._replace(op=Op.BACKWARD_INPUT) if part.op is Op.BACKWARD else part


def _needed_here(schedule: Schedule, part: Action) -> Iterator[Action]:
    """What this rank must have done before; an I stands for a B as well."""
    stage, microbatch = part.stage, part.microbatch
    match part.op:
        case Op.FORWARD:
            yield from _handed(schedule, part, schedule.sources[stage], Op.FORWARD, Op.RECV_F)
        case _ if part.op in INPUT_GRADIENTS:
            yield Action(Op.FORWARD, stage, microbatch)
            yield from _handed(schedule, part, schedule.targets[stage], Op.BACKWARD_INPUT, Op.RECV_B)
        case Op.BACKWARD_WEIGHT | Op.SEND_B:
            yield Action(Op.BACKWARD_INPUT, stage, microbatch)
        case Op.SEND_F:
            yield Action(Op.FORWARD, stage, microbatch)


def _handed(schedule: Schedule, part: Action, others: tuple[int, ...], computed: Op, received: Op) -> Iterator[Action]:
    """From each other stage, the computation on this rank or the receive."""
    home = schedule.placement.ranks
    for other in others:
        if home[other] == home[part.stage]:
            yield Action(computed, other, part.microbatch)
        elif schedule.has_messages:
            yield Action(received, part.stage, part.microbatch, other)
