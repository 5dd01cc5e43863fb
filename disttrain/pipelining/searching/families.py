"""Orders of F and I to try beside the named schedules: 1F1B with other warmups, blocks on a V with other offsets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedules.alternating import rounds
from disttrain.pipelining.schedules.building_block import PERIOD, Offsets, overlay
from disttrain.pipelining.schedules.counts import microbatches_per_round

Orders = list[list[Action]]

_WARMUPS_PER_HOP = (0.5, 1, 1.25, 1.5, 1.75, 2, 2.5, 3)


def warmups(placement: Placement, num_microbatches: int) -> Iterator[Orders]:
    """1F1B with one to three forwards more for each rank further from the end, on a loop."""
    num_ranks = placement.num_ranks
    stages_per_rank = placement.num_stages // num_ranks
    try:
        per_round = (
            num_microbatches if stages_per_rank == 1 else microbatches_per_round("", num_ranks, num_microbatches)
        )
    except ScheduleError:
        return
    for per_hop in _WARMUPS_PER_HOP:
        yield [
            _one_by_one(
                rounds(Op.FORWARD, stages, num_microbatches, per_round),
                rounds(Op.BACKWARD_INPUT, stages[::-1], num_microbatches, per_round),
                (stages_per_rank - 1) * per_round + round(per_hop * (num_ranks - 1 - rank)),
            )
            for rank, stages in enumerate(placement.stages)
        ]


def _one_by_one(forwards: list[Action], backwards: list[Action], num_warmup: int) -> list[Action]:
    later = forwards[num_warmup:]
    pairs = itertools.zip_longest(later, backwards)
    return forwards[:num_warmup] + [action for pair in pairs for action in pair if action is not None]


def blocks(num_ranks: int, num_microbatches: int, max_hop: int = 3) -> Iterator[Orders]:
    """Every block of F and I on a V that takes up to `max_hop` units from rank to rank and collides with none of its
    repetitions (arXiv:2405.15362, section 3)."""
    placement = Placement.v(num_ranks)
    for hops in itertools.product(range(1, max_hop + 1), repeat=4):
        for turn in range(PERIOD):
            offsets = [_offsets(num_ranks, rank, hops, turn) for rank in range(num_ranks)]
            if all(len({offset % PERIOD for offset in block}) == len(block) for block in offsets):
                yield [
                    overlay(stages, block, num_microbatches)
                    for stages, block in zip(placement.stages, offsets, strict=True)
                ]
                break


def _offsets(num_ranks: int, rank: int, hops: tuple[int, ...], turn: int) -> Offsets:
    """`turn` units pass between the last stage's F and its I."""
    there, back, gradients_there, gradients_back = hops
    behind = num_ranks - 1 - rank
    forward_back = there * (num_ranks - 1) + 1
    backward_there = forward_back + back * (num_ranks - 1) + 1 + turn
    backward_back = backward_there + gradients_there * (num_ranks - 1) + 1
    return (
        there * rank,
        forward_back + back * behind,
        backward_there + gradients_there * rank,
        backward_back + gradients_back * behind,
    )
