"""Forwards only, for evaluation: on any placement, each rank takes what has come furthest."""

from __future__ import annotations

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.counts import require_counts


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """As fast as it can be where stages take equally long; nothing is kept for a backward."""
    require_counts("ForwardOnly", placement.num_ranks, num_microbatches)
    num_stages = placement.num_stages
    arrived = [num_microbatches] + [0] * (num_stages - 1)  # so many microbatches have reached the stage
    done = [0] * num_stages
    ranks: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    while done[-1] < num_microbatches:
        ran = []
        for stages, order in zip(placement.stages, ranks, strict=True):
            stage = next((stage for stage in reversed(stages) if done[stage] < arrived[stage]), None)
            if stage is not None:
                order.append(Action(Op.FORWARD, stage, done[stage]))
                done[stage] += 1
                ran.append(stage)
        for stage in ran:
            if stage + 1 < num_stages:
                arrived[stage + 1] += 1
    return Schedule("ForwardOnly", placement, num_microbatches, tuple(map(tuple, ranks)), has_backward=False)
