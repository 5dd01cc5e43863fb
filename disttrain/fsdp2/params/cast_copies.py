"""Lets an optimizer write shards and their cast copies in one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from disttrain.fsdp2.params.cast_shards import CastShards, flat_versions
from disttrain.fsdp2.params.param_group import ParamGroup


class CastCopies:
    """Copies of shards that an optimizer casts in each of its steps. They are dropped when the next backward ends."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._begun: list[tuple[ParamGroup, torch.Tensor]] = []

    def begin(self) -> Mapping[int, torch.Tensor]:
        """By the parameter's id, memory of its part's shape, which the step is to write too."""
        copies: dict[int, torch.Tensor] = {}
        self._begun = []
        for group in self._groups:
            flat = group.flat_to_cast
            if flat is not None:
                values = torch.empty_like(flat, dtype=group.compute_dtype)
                self._begun.append((group, values))
                for param, slot in zip(group.params, group.plan.slots, strict=True):
                    copies[id(param.sharded)] = values.as_strided(*param.part_form, slot.offset)
        return copies

    def end(self, written: Iterable[torch.Tensor]) -> None:
        """The step has written these parameters, and their copies."""
        written_params = {*map(id, written)}
        for group, values in self._begun:
            flat = group.flat_to_cast
            parts: list[Any] = [param.sharded for param in group.params]
            if flat is not None and all(id(part) in written_params or not part._local_tensor.numel() for part in parts):
                group.cast_shards = CastShards(values, flat, flat_versions(group.params, flat))
        self._begun = []

    def forget(self) -> None:
        """Have the next gathers cast shards themselves."""
        for group in self._groups:
            group.cast_shards = None
