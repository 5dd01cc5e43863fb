"""Operators that take no values from their first operand: fills and factories like it.

A factory lies as its model does where both have the same size, so that what it makes meets the model without moving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated
from disttrain.dtensor.rules.parts import operand_part, partials_of, result_part
from disttrain.dtensor.spec.placement import NormPartial, Replicate, Shard
from disttrain.dtensor.spec.shard_sizes import contiguous_strides


def like(call: OpCall) -> Sequence[Signature]:
    """Cut as the operand; nothing is reduced for its shape's sake."""
    others = [Replicate()] * (len(call.operands) - 1)
    signatures = [all_replicated(call)]
    signatures += [Signature.of((kind, *others), Replicate()) for kind in partials_of(call, 0)]
    return signatures + [
        Signature.of((Shard(dim), *others), Shard(dim)) for dim in _common_dims(call.operand.shape, call.output_shape)
    ]


def _common_dims(shape: Sequence[int], made: Sequence[int]) -> list[int]:
    if len(shape) != len(made):
        return []
    return [dim for dim, (size, made_size) in enumerate(zip(shape, made, strict=True)) if size == made_size]


def sized(call: OpCall) -> Sequence[Signature]:
    """As `like`; whole where strides are asked for that a part cannot have."""
    strides = call.argument("stride")
    if strides is not None and tuple(strides) != contiguous_strides(call.output_shape):
        signatures = [all_replicated(call)]
        present = {placement for placement in call.operand.placements if placement != Replicate()}
        return signatures + [Signature.of((kind,), Replicate()) for kind in sorted(present, key=repr)]
    # A dim that differs is whole in the result, however the operand is cut along it.
    common = _common_dims(call.operand.shape, call.output_shape)
    differing = {placement for placement in call.operand.placements if placement.cut_dim not in (None, *common)}
    return [*like(call), *(Signature.of((placement,), Replicate()) for placement in sorted(differing, key=repr))]


def localize_sized(call: OpCall, propagation: Propagation) -> Compute:
    part = result_part(call, propagation)
    if part.local_shape == part.shape:
        return call.op
    size = part.local_shape
    if call.argument("stride") is None:

        def compute(local: torch.Tensor, _: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = call.op(local, size, *args, **kwargs)
            return made

        return compute

    def compute_strided(local: torch.Tensor, _: Any, __: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = call.op(local, size, contiguous_strides(size), *args, **kwargs)
        return made

    return compute_strided


def fill(call: OpCall) -> Sequence[Signature]:
    """Any placement: what was there does not matter. No norm is sure to be a number."""
    others = [Replicate()] * (len(call.operands) - 1)
    signatures = [all_replicated(call)]
    signatures += [
        Signature.of((kind, *others), kind) for kind in partials_of(call, 0) if not isinstance(kind, NormPartial)
    ]
    return signatures + [Signature.of((Shard(dim), *others), Shard(dim)) for dim in range(len(call.operand.shape))]


def localize_fill(call: OpCall, propagation: Propagation) -> Compute:
    """Of a sum, or a product, the first rank holds the value and the others what changes nothing."""
    part = operand_part(call, propagation, 0)
    for axis, placement in enumerate(part.placements):
        if placement.is_partial("sum") or placement.is_partial("product"):
            if part.mesh.get_local_rank(axis) == 0:
                continue
            neutral = 0 if placement.is_partial("sum") else 1
            return _filling(call, neutral)
    return call.op


def _filling(call: OpCall, value: int) -> Compute:
    def compute(local: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return local.fill_(value) if call.facts.mutated else torch.full_like(local, value)

    return compute


_LIKE = Rule(like)
_SIZED = Rule(sized, localize_sized)
_FILL = Rule(fill, localize_fill, goes_by_layout=True)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten.empty_like", "aten.full_like", "aten.ones_like", "aten.zeros_like"), _LIKE),
    **dict.fromkeys(
        ("aten.new_empty", "aten.new_empty_strided", "aten.new_full", "aten.new_ones", "aten.new_zeros"), _SIZED
    ),
    "aten.fill": _FILL,
    "aten.zero": _FILL,
}
