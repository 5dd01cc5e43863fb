"""Places of tensors of several dtypes in one buffer of bytes, in which they are gathered as one message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from disttrain.fsdp2.transfers.forms import ALIGNMENT_BYTES
from disttrain.kernels.copies.operator import unpack_rows

Kind: TypeAlias = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True)
class Packing:
    """`starts`: the byte at which each tensor begins; `sizes`: their bytes; `order`: their numbers as they follow each
    other; `num_bytes`: of all, up to where the next message may begin."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    num_bytes: int

    @property
    def num_unused(self) -> int:
        """The bytes behind the last tensor."""
        return self.num_bytes - sum(self.sizes)


@lru_cache(maxsize=1024)
def packing_of(kinds: tuple[Kind, ...]) -> Packing:
    """Packs without gaps: first what fills whole units of the alignment, then large elements before small ones."""
    sizes = tuple(math.prod(shape) * dtype.itemsize for shape, dtype in kinds)
    order = sorted(range(len(kinds)), key=lambda index: (sizes[index] % ALIGNMENT_BYTES > 0, -kinds[index][1].itemsize))
    starts, end = [0] * len(kinds), 0
    for index in order:
        starts[index], end = end, end + sizes[index]
    return Packing(tuple(starts), sizes, tuple(order), -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


def packed(tensors: Sequence[torch.Tensor], packing: Packing) -> torch.Tensor:
    """The bytes of all, (num_bytes,)."""
    parts = [tensors[index].contiguous().view(-1).view(torch.uint8) for index in packing.order]
    return torch.cat([*parts, torch.zeros(packing.num_unused, dtype=torch.uint8, device=parts[0].device)])


class Unpacking:
    """Memory of what several ranks have packed alike, and how to fill it: tensors of each rank's shape, one behind the
    other along the first dim."""

    def __init__(self, kinds: tuple[Kind, ...], num_ranks: int, device: torch.device) -> None:
        packing = packing_of(kinds)
        with torch.inference_mode(False):
            self.tensors = [
                torch.empty((num_ranks * shape[0], *shape[1:]) if shape else (num_ranks,), dtype=dtype, device=device)
                for shape, dtype in kinds
            ]
            unused = torch.empty((num_ranks, packing.num_unused), dtype=torch.uint8, device=device)
            # `.data` keeps the version: the memory that autograd has saved will have the same values again.
            places = [
                tensor.data.view(-1).view(torch.uint8).view(num_ranks, size)
                for tensor, size in zip(self.tensors, packing.sizes, strict=True)
            ]
        self._places = [*(places[index] for index in packing.order), unused]
        self._sizes = [rows.shape[1] for rows in self._places]

    def fill(self, gathered: torch.Tensor) -> None:
        """Take over the bytes of all ranks, (num_ranks, num_bytes)."""
        unpack_rows(gathered, self._sizes, self._places)
