"""Shards cast to the dtype that is gathered, written by an optimizer with its step: gathers cast nothing then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from disttrain.fsdp2._torch import versions_of

if TYPE_CHECKING:
    from disttrain.fsdp2.params.flat import FlatSlot
    from disttrain.fsdp2.params.param import ShardedParam
    from disttrain.fsdp2.params.param_group import ParamGroup


@dataclass(frozen=True)
class CastShards:
    """`values` are those of a group's flat buffer in another dtype, while nobody has written to that since."""

    values: torch.Tensor
    flat: torch.Tensor
    versions: tuple[int, ...]


def latest(group: ParamGroup, flat: torch.Tensor) -> torch.Tensor:
    """Returns what to gather: the cast shards where they are still those of the flat buffer, else that."""
    cast = group.cast_shards
    if cast is None or cast.flat is not flat or cast.values.dtype != group.compute_dtype:
        return flat
    return cast.values if cast.versions == _versions(group, flat) else flat


class CastCopies:
    """Copies of shards that an optimizer casts in each of its steps. They are dropped when the next backward ends."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._begun: list[tuple[ParamGroup, torch.Tensor]] = []

    def begin(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """By parameter, memory of its part's shape, which the step is to write too."""
        copies: dict[nn.Parameter, torch.Tensor] = {}
        self._begun = []
        for group in self._groups:
            flat = group.flat_to_cast
            if flat is not None:
                values = torch.empty_like(flat, dtype=group.compute_dtype)
                self._begun.append((group, values))
                copies |= {param.sharded: param.slot_view(values, slot) for param, slot in _placed(group)}
        return copies

    def end(self, written: Iterable[torch.Tensor]) -> None:
        """The step has written these parameters, and their copies."""
        written_params = set(written)
        for group, values in self._begun:
            flat = group.flat_to_cast
            parts: list[Any] = [param.sharded for param in group.params]
            if flat is not None and all(part in written_params or not part._local_tensor.numel() for part in parts):
                group.cast_shards = CastShards(values, flat, _versions(group, flat))
        self._begun = []


def _versions(group: ParamGroup, flat: torch.Tensor) -> tuple[int, ...]:
    # What goes through a DTensor counts there alone.
    return versions_of([flat, *(param.sharded for param in group.params)])


def _placed(group: ParamGroup) -> Iterable[tuple[ShardedParam, FlatSlot]]:
    return zip(group.params, group.plan.slots, strict=True)
