"""Looped BFS: all microbatches through one stage before the rank's next stage (Lamy-Poirier, arXiv:2211.05953)."""

from __future__ import annotations

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.counts import require_counts


def looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """The bubble of interleaving and the memory of GPipe; a stage is unsharded twice per step only.

    As in torch, backwards take the microbatches from the last to the first.
    """
    require_counts("LoopedBFS", num_ranks, num_microbatches, stages_per_rank)
    placement = Placement.loop(num_ranks, stages_per_rank)
    microbatches = range(num_microbatches)
    ranks = tuple(
        (
            *(Action(Op.FORWARD, stage, microbatch) for stage in stages for microbatch in microbatches),
            *(Action(Op.BACKWARD, stage, microbatch) for stage in stages[::-1] for microbatch in microbatches[::-1]),
        )
        for stages in placement.stages
    )
    return Schedule("LoopedBFS", placement, num_microbatches, ranks)
