"""Casts of shards by torch's operators, for CPUs and GPUs without float8; they judge the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from disttrain.kernels.float8 import reference


class Shard(NamedTuple):
    """`values` (R, C), and where they go in bytes: their codes, with zeros up to `num_rows` rows, and the scales."""

    values: torch.Tensor
    num_rows: int
    codes_start: int
    scales_start: int


def cast_shards(shards: Sequence[Shard], sent: torch.Tensor, dtype: torch.dtype, by_rows: bool) -> None:
    """As in `shards.py`."""
    for shard in shards:
        codes, scales, *_ = reference.cast(shard.values, None, 1, dtype, by_rows, True, False)
        size, num_columns = codes.numel(), shard.values.shape[1]
        target = sent.narrow(0, shard.codes_start, shard.num_rows * num_columns)
        target[:size].copy_(codes.view(-1).view(torch.uint8))
        target[size:].zero_()
        num_scales = shard.num_rows if by_rows else 1
        of_rows = sent.narrow(0, shard.scales_start, 4 * num_scales).view(torch.float32)
        of_rows[: len(scales)].copy_(scales)
        of_rows[len(scales) :].fill_(1.0)
