"""Casts the shards of many weights to float8 at once, right into the buffer that is sent.

Each shard is cast as by `operator.cast`, bit by bit, without a transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttrain.kernels.choice import choose
from disttrain.kernels.float8 import shards_reference
from disttrain.kernels.float8.operator import obstacle
from disttrain.kernels.float8.shards_reference import Shard


def cast_shards(shards: Sequence[Shard], sent: torch.Tensor, dtype: torch.dtype, *, by_rows: bool) -> None:
    """Write codes of `dtype` and scales of all shards into `sent`, bytes.

    Shards are of one dtype. Codes begin at multiples of 16 bytes where their numbers are such, scales at multiples of
    4. By rows, rows that are not there have the scale 1.
    """
    shards = [shard._replace(values=shard.values.contiguous()) for shard in shards]
    told_by = next((shard.values for shard in shards if shard.values.numel()), sent)
    kernels = choose("float8_cast", told_by, obstacle(told_by), shards_reference, _load)
    kernels.cast_shards(shards, sent, dtype, by_rows)


def _load() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.float8 import shards_triton

    return shards_triton
