"""Stages are unsharded when they compute, and resharded at the end; each reduces its gradients once, after its last
W."""

from __future__ import annotations

from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import COMPUTE, WEIGHT_GRADIENTS, Action, Op
from disttrain.pipelining.schedule.schedule import Schedule


def check_sharding(schedule: Schedule) -> Iterator[Problem]:
    """For each of the two kinds, either all stages have actions of it or none."""
    kinds = {action.op for actions in schedule.ranks for action in actions}
    for rank, actions in enumerate(schedule.ranks):
        if kinds & {Op.UNSHARD, Op.RESHARD}:
            yield from _unsharded(rank, actions)
        yield from _reduced(rank, actions, schedule.placement.stages[rank], Op.REDUCE_GRAD in kinds)


def _unsharded(rank: int, actions: tuple[Action, ...]) -> Iterator[Problem]:
    whole: dict[int, int] = {}
    for position, action in enumerate(actions):
        stage = action.stage
        match action.op:
            case Op.UNSHARD if stage in whole:
                yield Problem(f"{action}: the stage is unsharded already.", "Reshard it first.", rank, position)
            case Op.UNSHARD:
                whole[stage] = position
            case Op.RESHARD if stage not in whole:
                yield Problem(f"{action}: the stage is not unsharded.", "Unshard it first.", rank, position)
            case Op.RESHARD:
                del whole[stage]
            case _ if action.op in COMPUTE:
                if any(part.stage not in whole for part in action.parts):
                    yield Problem(f"{action} computes with a sharded stage.", "Unshard it first.", rank, position)
    for stage, position in whole.items():
        yield Problem(f"Stage {stage} is never resharded.", "Reshard it after its last action.", rank, position)


def _reduced(rank: int, actions: tuple[Action, ...], stages: tuple[int, ...], wanted: bool) -> Iterator[Problem]:
    """Also, tied gradients are sent when they are complete."""
    last_gradient: dict[int, int] = {}
    reductions: dict[int, list[int]] = {stage: [] for stage in stages}
    for position, action in enumerate(actions):
        if action.op is Op.REDUCE_GRAD:
            reductions[action.stage].append(position)
        for part in action.parts:
            if part.op in WEIGHT_GRADIENTS:
                last_gradient[part.stage] = position
    for stage, positions in reductions.items():
        if wanted and len(positions) != 1:
            yield Problem(f"Stage {stage} reduces its gradients {len(positions)} times.", "Reduce them once.", rank)
        elif wanted and positions[0] < last_gradient.get(stage, -1):
            text = f"Stage {stage} reduces its gradients before its last W."
            yield Problem(text, "Reduce them after it.", rank, positions[0])
    for position, action in enumerate(actions):
        if action.op is Op.SEND_TIED:
            complete = max([last_gradient.get(action.stage, -1), *reductions[action.stage]])
            if position < complete:
                yield Problem(f"{action} sends a gradient that is not complete.", "Send it later.", rank, position)
