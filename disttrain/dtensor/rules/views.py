"""Views that keep every dim they do not look into: each is a map from the operand's dims to the result's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, always
from disttrain.dtensor.rules.dim_maps import (
    LINEAR,
    dim_of,
    inverse,
    mapped,
    unchanged,
    with_local_size,
    without,
)
from disttrain.dtensor.views.view_copy import Fetch


def _rank_of(call: OpCall) -> int:
    return len(call.operand.shape)


def _permute(call: OpCall) -> dict[int, int]:
    num_dims = _rank_of(call)
    return {dim % num_dims: position for position, dim in enumerate(call.argument("dims", ()))}


def _transpose(call: OpCall) -> dict[int, int]:
    num_dims = _rank_of(call)
    if num_dims == 0:
        return {}
    first, second = dim_of(call, "dim0", num_dims), dim_of(call, "dim1", num_dims)
    return {**unchanged(num_dims), first: second, second: first}


def _t(call: OpCall) -> dict[int, int]:
    return {0: 1, 1: 0} if _rank_of(call) == 2 else unchanged(_rank_of(call))


def _unsqueeze(call: OpCall) -> dict[int, int]:
    new_dim = dim_of(call, "dim", _rank_of(call) + 1)
    return {dim: dim + (dim >= new_dim) for dim in range(_rank_of(call))}


def squeezed_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that go; of those named, the ones of size 1."""
    shape = call.operand.shape
    named = call.argument("dim")
    dims = range(len(shape)) if named is None else (named,) if isinstance(named, int) else named
    return tuple(sorted({dim % len(shape) for dim in dims if shape and shape[dim % len(shape)] == 1}))


def _squeeze(call: OpCall) -> dict[int, int]:
    return without(_rank_of(call), squeezed_dims(call))


def _squeeze_parts(call: OpCall, _: Propagation) -> Compute:
    """Not every dim of size 1 that a part has is one of the whole's."""
    dims = squeezed_dims(call)
    if call.facts.is_inplace:
        return lambda part, *_: part.squeeze_(dims)
    return lambda part, *_: part.squeeze(dims)


def _expand(call: OpCall) -> dict[int, int]:
    shape, result = call.operand.shape, call.output_shape
    shift = len(result) - len(shape)
    return {dim: dim + shift for dim, size in enumerate(shape) if size == result[dim + shift]}


def _diagonal(call: OpCall) -> dict[int, int]:
    num_dims = _rank_of(call)
    looked_into = {dim_of(call, "dim1", num_dims, 0), dim_of(call, "dim2", num_dims, 1)}
    return without(num_dims, looked_into)


def _diagonal_backward(call: OpCall) -> dict[int, int]:
    num_dims = len(call.output_shape)
    return inverse(without(num_dims, {dim_of(call, "dim1", num_dims), dim_of(call, "dim2", num_dims)}))


def _unfold(call: OpCall) -> dict[int, int]:
    num_dims = _rank_of(call)
    return unchanged(num_dims, {dim_of(call, "dimension", num_dims)}) if num_dims else {}


def _unfold_backward(call: OpCall) -> dict[int, int]:
    num_dims = len(call.output_shape)
    # torch's own istft gives it a gradient that is to be broadcast.
    sizes = zip(call.operand.shape, call.output_shape, strict=False)
    blocked = {dim for dim, (old_size, size) in enumerate(sizes) if old_size != size}
    return unchanged(num_dims, {*blocked, dim_of(call, "dim", num_dims)}) if num_dims else {}


def _unbind(call: OpCall) -> dict[int, int]:
    num_dims = _rank_of(call)
    return without(num_dims, {dim_of(call, "dim", num_dims)})


def _same_dims(call: OpCall) -> dict[int, int]:
    return unchanged(_rank_of(call))


def _without_last(call: OpCall) -> dict[int, int]:
    return unchanged(_rank_of(call) - 1)


def _copying(dims: Callable[[OpCall], dict[int, int]]) -> Callable[[OpCall], Sequence[Signature]]:
    """Every element of the result is one of the operand's, or zero: whatever is partial stays so."""
    return lambda call: mapped(call, dims(call))


def _linear(dims: Callable[[OpCall], dict[int, int]]) -> Callable[[OpCall], Sequence[Signature]]:
    return lambda call: mapped(call, dims(call), LINEAR)


def _fetched(read: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    """Views by a bit that tensors carry: `read`, its own inverse, sets it aside, since collectives don't look at it."""
    fetch = Fetch(lambda part: read(part).clone(), lambda moved, part: _copy(read(moved), part))
    return Rule(_linear(_same_dims), lambda *_: lambda moved, *_: moved.view_as(moved), fetch=lambda *_: fetch)


def _copy(values: torch.Tensor, part: torch.Tensor) -> None:
    part.copy_(values)


RULES: dict[str, Rule] = {
    "aten._conj": _fetched(torch.conj_physical),
    "aten._neg_view": _fetched(torch.neg),
    "aten.alias": Rule(_copying(_same_dims)),
    "aten.detach": Rule(_copying(_same_dims)),
    "aten.diagonal": Rule(_copying(_diagonal)),
    "aten.diagonal_backward": Rule(_copying(_diagonal_backward), with_local_size("input_sizes")),
    "aten.expand": Rule(_copying(_expand), with_local_size("size")),
    "aten.permute": Rule(_copying(_permute)),
    "aten.squeeze": Rule(_copying(_squeeze), _squeeze_parts, goes_by_layout=True, computes_by_layout=always),
    "aten.t": Rule(_copying(_t)),
    "aten.transpose": Rule(_copying(_transpose)),
    "aten.unbind": Rule(_copying(_unbind)),
    "aten.unfold": Rule(_copying(_unfold)),
    "aten.unfold_backward": Rule(_linear(_unfold_backward), with_local_size("input_sizes")),
    "aten.unsqueeze": Rule(_copying(_unsqueeze)),
    "aten.view_as_complex": Rule(_linear(_without_last)),
    "aten.view_as_real": Rule(_linear(_same_dims)),
}
