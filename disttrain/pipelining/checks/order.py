"""On its own rank, each action comes after those whose results it uses: F before I before W; a message is sent after it
was computed, and received before it is used; of two stages on one rank, the first computes first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.dependencies import inputs_of
from disttrain.pipelining.schedule.schedule import Schedule

Key = tuple[Op, int, int | None]


def check_order(schedule: Schedule) -> Iterator[Problem]:
    home = schedule.placement.ranks
    # What each kind of computation or send of a stage uses on its own rank; the same for all microbatches.
    used: dict[tuple[Op, int], list[Key]] = {}
    for rank, actions in enumerate(schedule.ranks):
        done: defaultdict[Key, set[int | None]] = defaultdict(set)
        for position, action in enumerate(actions):
            parts = action.parts
            for part in parts:
                kind = part.op, part.stage
                if kind not in used:
                    inputs = inputs_of(schedule, part, by_message=schedule.has_messages)
                    used[kind] = [_key(needed) for needed in inputs if home[needed.stage] == rank]
                for key in used[kind]:
                    if part.microbatch not in done[key]:
                        op, stage, peer = key
                        text = f"{action} comes before {Action(op, stage, part.microbatch, peer)}, which it uses."
                        yield Problem(text, "Exchange them.", rank, position)
            # Children of an OVERLAP run at the same time: none may use what another computes.
            for part in parts:
                done[_key(part)].add(part.microbatch)


def _key(part: Action) -> Key:
    """Without the microbatch, as `inputs_of` names it."""
    return Op.BACKWARD_INPUT if part.op is Op.BACKWARD else part.op, part.stage, part.peer
