"""Shards in the dtype that is gathered, written by an optimizer's step, so that gathers need not cast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from disttrain.dtensor.views.data import num_data_writes
from disttrain.fsdp2._torch import versions_of
from disttrain.fsdp2.params.param import ShardedParam


@dataclass(frozen=True)
class CastShards:
    """`values` are those of a group's flat buffer in another dtype, valid until something writes to that buffer."""

    values: torch.Tensor
    flat: torch.Tensor
    versions: tuple[int, ...]


def latest(
    cast: CastShards | None, params: Iterable[ShardedParam], flat: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns what to gather: the cast shards where they are still those of the flat buffer, else that."""
    if cast is None or cast.flat is not flat or cast.values.dtype != dtype:
        return flat
    return cast.values if cast.versions == flat_versions(params, flat) else flat


def flat_versions(params: Iterable[ShardedParam], flat: torch.Tensor) -> tuple[int, ...]:
    """Versions that change when shards in the flat buffer are written to. A write through a DTensor counts only for the
    DTensor, one through its `.data` for neither."""
    shards = [param.sharded for param in params]
    return (num_data_writes(shards), *versions_of([flat, *shards]))
