"""Inserts the gathers of a stage's sharded parameters, and the points at which they are freed.

At any time the stages of the next computations are unsharded, as many as there is room for. The stage that is needed
next is gathered (a prefetch, if others compute before it), and stages that are not among the next are freed. This is
Belady's rule, and no other order of gathers is better.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.action import COMPUTE, Action, Op
from disttrain.pipelining.schedule.schedule import Schedule


def unshard_stages(schedule: Schedule, max_unsharded: int | None = None) -> Schedule:
    """UNSHARD and RESHARD around the computations.

    Args: max_unsharded  stages that a rank may have unsharded at once, one of which is being gathered while others
          compute; None: all of its stages, each gathered once per step; 1: gathered for each run of computations.
    Raises: ScheduleError when an OVERLAP needs more.
    """
    return schedule.with_ranks([_unshard(schedule.name, actions, max_unsharded) for actions in schedule.ranks])


def _unshard(name: str, actions: Sequence[Action], max_unsharded: int | None) -> list[Action]:
    uses: dict[int, deque[int]] = {}
    needs = list(map(_stages, actions))
    for position, needed in enumerate(needs):
        for stage in needed:
            uses.setdefault(stage, deque()).append(position)
    room = len(uses) if max_unsharded is None else max_unsharded
    unsharded: dict[int, None] = {}
    result: list[Action] = []
    # Where there is room for all, those that are unsharded change only after the last use of one of them.
    is_settled = False
    for action, needed in zip(actions, needs, strict=True):
        if len(needed) > room:
            raise ScheduleError(
                name,
                f"{action} needs {len(needed)} unsharded stages, max_unsharded is {room}.",
                f"Allow {len(needed)} or more.",
            )
        if needed and not (is_settled and room >= len(uses)):
            # The next ones, in the order in which they are needed; of what is never needed again, nothing.
            soonest = heapq.nsmallest(room, ((queue[0], stage) for stage, queue in uses.items() if queue))
            coming = [stage for _, stage in soonest]
            result += (Action(Op.RESHARD, stage) for stage in unsharded if stage not in coming)
            result += (Action(Op.UNSHARD, stage) for stage in coming if stage not in unsharded)
            unsharded = dict.fromkeys([*(stage for stage in unsharded if stage in coming), *coming])
        is_settled = is_settled or bool(needed)
        for stage in needed:
            uses[stage].popleft()
            is_settled = is_settled and bool(uses[stage])
        result.append(action)
    return result + [Action(Op.RESHARD, stage) for stage in unsharded]


def _stages(action: Action) -> list[int]:
    if action.op not in COMPUTE:
        return []
    return list(dict.fromkeys(part.stage for part in action.children)) if action.children else [action.stage]
