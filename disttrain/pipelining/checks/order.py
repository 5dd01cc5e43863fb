"""On its own rank, each action comes after those whose results it uses: F before I before W; a message is sent after it
was computed, and received before it is used; of two stages on one rank, the first computes first."""

from __future__ import annotations

from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import Action
from disttrain.pipelining.schedule.dependencies import as_input, inputs_of
from disttrain.pipelining.schedule.schedule import Schedule


def check_order(schedule: Schedule) -> Iterator[Problem]:
    for rank, actions in enumerate(schedule.ranks):
        done: set[Action] = set()
        for position, action in enumerate(actions):
            for part in action.parts:
                for needed in inputs_of(schedule, part, by_message=schedule.has_messages):
                    if needed not in done and schedule.placement.ranks[needed.stage] == rank:
                        yield Problem(
                            f"{action} comes before {needed}, which it uses.", "Exchange them.", rank, position
                        )
            # Children of an OVERLAP run at the same time: none may use what another computes.
            done.update(map(as_input, action.parts))
