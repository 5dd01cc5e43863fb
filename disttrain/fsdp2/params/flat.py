"""Lays the shards of several parameters out in one flat buffer. Pure arithmetic.

One dim of every parameter is cut as `torch.chunk` cuts, and brought to the front; each rank's piece is padded to the
size of the first. A rank's buffer is its pieces one after the other, so one all-gather brings all parameters: row r of
its result is rank r's buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from disttrain.pieces import piece_size


@dataclass(frozen=True)
class FlatSlot:
    """One parameter's place: `offset` and `padded_numel` in the buffer; `padded_rows` times the ranks cover its dim.

    `shape` has the cut dim in front.
    """

    shape: tuple[int, ...]
    padded_rows: int
    padded_numel: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatPlan:
    """The places of all parameters in a rank's buffer of `shard_numel` elements."""

    slots: tuple[FlatSlot, ...]
    shard_numel: int
    num_shards: int

    @cached_property
    def split_sizes(self) -> list[int]:
        """Elements of each parameter in a rank's buffer."""
        return [slot.padded_numel for slot in self.slots]


def plan_flat(shapes: Sequence[tuple[int, ...]], num_shards: int) -> FlatPlan:
    """Places for parameters of these shapes, their cut dims in front, cut for `num_shards` ranks."""
    return _plan_flat(tuple(shapes), num_shards)


@lru_cache(maxsize=1024)
def _plan_flat(shapes: tuple[tuple[int, ...], ...], num_shards: int) -> FlatPlan:
    # Of what is reduced apart or together it is asked in each step.
    slots: list[FlatSlot] = []
    offset = 0
    for shape in shapes:
        padded_rows = piece_size(shape[0], num_shards)
        slot = FlatSlot(shape, padded_rows, padded_rows * math.prod(shape[1:]), offset)
        slots.append(slot)
        offset += slot.padded_numel
    return FlatPlan(tuple(slots), offset, num_shards)
