"""Operators that put tensors side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from disttrain.dtensor.redistribute.exchange import Exchange, sole_axis
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated
from disttrain.dtensor.spec.index_range import IndexRange
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import NormPartial, Partial, Placement, Replicate, Shard


def stack(call: OpCall) -> Sequence[Signature]:
    """Every operand alike: sharded along any dim, or partial, since reductions work element by element."""
    num_operands, num_dims = len(call.operands), len(call.output_shape)
    new_dim = int(call.argument("dim", 0)) % num_dims
    signatures = [all_replicated(call)]
    signatures += [
        Signature.of((Shard(dim),) * num_operands, Shard(dim + (dim >= new_dim))) for dim in range(num_dims - 1)
    ]
    signatures += [Signature.of((partial,) * num_operands, partial) for partial in _partials(call)]
    return signatures


def _partials(call: OpCall) -> list[Partial]:
    specs = [spec for spec in call.operands if spec is not None]
    if len(specs) < len(call.operands):
        return []  # every rank would count the plain scalar
    present: list[Placement] = [placement for spec in specs for placement in spec.placements]
    kinds = {placement for placement in present if isinstance(placement, Partial)}
    # Any value is a sum, but only another norm is sure to be a norm: what is negative is none.
    return [
        kind
        for kind in sorted(kinds, key=repr)
        if not isinstance(kind, NormPartial) or all(kind in spec.placements for spec in specs)
    ]


def cat(call: OpCall) -> Sequence[Signature]:
    """As stack; and along the dim itself, where one axis cuts it, each element goes to whose piece it is in."""
    num_operands, num_dims = len(call.operands), len(call.output_shape)
    along = int(call.argument("dim", 0)) % num_dims
    signatures = [all_replicated(call)]
    signatures += [
        Signature.of([_beside(spec, dim) for spec in call.operands], Shard(dim))
        for dim in range(num_dims)
        if dim != along
    ]
    signatures += [Signature.of((partial,) * num_operands, partial) for partial in _partials(call)]
    axis = _sole_axis_along(call, along)
    if axis is not None and not any(_is_left_out(spec, num_dims) for spec in call.operands):
        signatures.append(Signature((Shard(along),) * num_operands, (Shard(along),), only_axis=axis))
    return signatures


def _is_left_out(spec: Spec | None, num_dims: int) -> bool:
    """True for an empty tensor of one dim, which may stand among tensors of any number of dims."""
    return spec is not None and spec.shape == (0,) and num_dims > 1


def _beside(spec: Spec | None, dim: int) -> Placement:
    return Replicate() if spec is None or (spec.shape == (0,) and dim > 0) else Shard(dim)


def _sole_axis_along(call: OpCall, dim: int) -> int | None:
    """The one mesh axis that cuts `dim` in any operand, into consecutive pieces; None where there is no such one."""
    cuts = {
        (axis, placement)
        for spec in call.operands
        if spec is not None
        for axis, placement in enumerate(spec.placements)
        if placement.cut_dim == dim
    }
    return cuts.pop()[0] if len(cuts) == 1 and all(isinstance(placement, Shard) for _, placement in cuts) else None


def _cat_parts(call: OpCall, propagation: Propagation) -> Compute:
    result = Spec.of(propagation.results[0], call.output_shape, call.outputs[0].dtype)
    dim = int(call.argument("dim", 0)) % len(result.shape)
    axis = sole_axis(result, dim)
    if axis is None:
        return call.op
    sizes = [spec.shape[dim] for spec in call.operands if spec is not None]
    slices = [IndexRange(begin, size) for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]
    # What ranks have of the operands are slices of the result.
    exchange = Exchange(result.mesh, axis, dim, result.shape[dim], slices)

    def compute(parts: Sequence[torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        joined = torch.cat(list(parts), dim)
        whole = joined.new_empty(result.local_shape)
        exchange.write(joined, whole)
        return whole

    return compute


RULES = {"aten.cat": Rule(cat, _cat_parts, goes_by_layout=True), "aten.stack": Rule(stack)}
