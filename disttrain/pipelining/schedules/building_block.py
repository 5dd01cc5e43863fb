"""Schedules on a V by repeating a building block: one microbatch's actions at offsets that collide with no other's when
a block begins every 6 units of time. How long a block holds its activations decides the memory (Qi et al., Pipeline
Parallelism with Controllable Memory, arXiv:2405.15362)."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.fill_weights import fill_weights
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule

PERIOD = 6  # F, I and W of two stages

# When a rank runs its block's F there, F back, I back and I there.
Offsets = tuple[int, int, int, int]


def repeat_block(name: str, num_microbatches: int, blocks: Sequence[Offsets], most_held: int) -> Schedule:
    """Each rank has the order of its overlaid blocks, and begins as soon as it can. It runs a W when it would otherwise
    wait, or hold more than `most_held` forwards."""
    placement = Placement.v(len(blocks))
    orders = [overlay(stages, block, num_microbatches) for stages, block in zip(placement.stages, blocks, strict=True)]
    template = Schedule(name, placement, num_microbatches, ((),) * placement.num_ranks)
    filled = fill_weights(template, orders, Costs(), most_held, is_strict=False)
    assert filled is not None  # orders made of one repeated block cannot deadlock
    return filled.schedule


def overlay(stages: tuple[int, ...], block: Offsets, num_microbatches: int) -> list[Action]:
    """A rank's F and I when a block begins every `PERIOD`."""
    down, up = stages
    kinds = (Op.FORWARD, down), (Op.FORWARD, up), (Op.BACKWARD_INPUT, up), (Op.BACKWARD_INPUT, down)
    planned = sorted(
        (offset + PERIOD * microbatch, Action(op, stage, microbatch))
        for offset, (op, stage) in zip(block, kinds, strict=True)
        for microbatch in range(num_microbatches)
    )
    return [action for _, action in planned]
