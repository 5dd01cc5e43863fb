"""Operators that take places of one dim, and those that put values there.

Where that dim is cut along one axis, a slice stays cut: elements go to the rank whose piece of the slice they are in,
and nowhere else. One element of it goes to every rank. Several axes on that dim, or pieces by blocks, are undone first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from disttrain.dtensor.redistribute.exchange import Broadcast, Exchange, elements, sole_axis
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature
from disttrain.dtensor.rules.dim_maps import (
    dim_of,
    inverse,
    mapped,
    result_spec,
    unchanged,
    with_argument,
    without,
)
from disttrain.dtensor.spec.index_range import IndexRange
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Replicate, Shard
from disttrain.dtensor.views.view_copy import Fetch

# Slices and splits: every result is a slice of the operand.


def _dim(call: OpCall) -> int:
    return dim_of(call, "dim", len(call.operand.shape))


def _places(call: OpCall, size: int) -> IndexRange:
    return IndexRange.of_slice(size, call.argument("start"), call.argument("end"), call.argument("step", 1))


def _slices(call: OpCall) -> list[IndexRange]:
    """The places of the dim that each result has."""
    dim = _dim(call)
    if call.facts.name == "aten.slice":
        return [_places(call, call.operand.shape[dim])]
    sizes = [output.shape[dim] for output in call.outputs]
    return [IndexRange(begin, size) for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]


def _is_whole(call: OpCall, size: int) -> bool:
    """True where all of the dim's `size` elements are taken, in order."""
    if "slice" not in call.facts.name:
        return len(call.outputs) == 1
    start, end, step = call.argument("start", 0), call.argument("end", size), call.argument("step", 1)
    return bool(step == 1 and start == 0 and end >= size)


def _may_be_cut(call: OpCall, spec: Spec, size: int) -> bool:
    dim = _dim(call)
    if all(placement.cut_dim != dim for placement in spec.placements):
        return False
    return sole_axis(spec, dim) is not None or _is_whole(call, size)


def _sliced(call: OpCall) -> Sequence[Signature]:
    spec, dim = call.operand, _dim(call)
    may_be_cut = _may_be_cut(call, spec, spec.shape[dim])
    return mapped(call, unchanged(len(spec.shape), () if may_be_cut else {dim}))


def _exchange(call: OpCall, propagation: Propagation) -> Exchange | None:
    """The exchange that brings a slice of the cut dim to its ranks; None where the dim is not cut, or taken whole."""
    spec, dim = call.operand, _dim(call)
    axis = sole_axis(spec, dim)
    if axis is None or propagation.operands[0] is not spec.layout or _is_whole(call, spec.shape[dim]):
        return None
    return Exchange(spec.mesh, axis, dim, spec.shape[dim], _slices(call))


def _sliced_parts(call: OpCall, propagation: Propagation) -> Compute:
    exchange = _exchange(call, propagation)
    is_one = call.facts.name == "aten.slice"
    if exchange is None:
        return call.op
    dim = exchange.dim
    if exchange.is_local:
        local_slices = exchange.own
        if is_one:
            return lambda part, *_, **__: elements(part, dim, local_slices[0])
        return lambda part, *_, **__: [elements(part, dim, places) for places in local_slices]
    sizes = exchange.sizes
    if is_one:
        return lambda moved, *_, **__: moved.view_as(moved)
    return lambda moved, *_, **__: list(moved.split_with_sizes(sizes, dim))


def _fetch_slices(call: OpCall, propagation: Propagation) -> Fetch | None:
    exchange = _exchange(call, propagation)
    return None if exchange is None or exchange.is_local else Fetch(exchange.read, exchange.write)


def _slice_backward(call: OpCall) -> Sequence[Signature]:
    spec, dim = call.operand, _dim(call)
    may_be_cut = _may_be_cut(call, spec, call.output_shape[dim])
    return mapped(call, unchanged(len(spec.shape), () if may_be_cut else {dim}))


def _slice_backward_parts(call: OpCall, propagation: Propagation) -> Compute:
    result, dim = result_spec(call, propagation), _dim(call)
    shape = result.local_shape
    axis = sole_axis(result, dim)
    if axis is None or _is_whole(call, result.shape[dim]):
        return with_argument(call, "input_sizes", shape)
    exchange = Exchange(result.mesh, axis, dim, result.shape[dim], [_places(call, result.shape[dim])])

    def compute(grad: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        whole = grad.new_zeros(shape)
        if exchange.is_local:
            elements(whole, dim, exchange.own[0]).copy_(grad)
        else:
            exchange.write(grad, whole)
        return whole

    return compute


# One element of a dim.


def _is_cut_in_name(spec: Spec, dim: int) -> bool:
    """True where `dim` is cut only along axes of one rank, which has all of it."""
    axes = [axis for axis, placement in enumerate(spec.placements) if placement.cut_dim == dim]
    return bool(axes) and all(spec.mesh.shape[axis] == 1 for axis in axes)


def _selected(call: OpCall) -> Sequence[Signature]:
    spec, dim = call.operand, _dim(call)
    signatures = mapped(call, without(len(spec.shape), {dim}))
    if sole_axis(spec, dim) is not None and not _is_cut_in_name(spec, dim):
        signatures.append(Signature.of((Shard(dim),), Replicate()))
    return signatures


def _broadcast(call: OpCall, propagation: Propagation) -> Broadcast | None:
    spec, dim = call.operand, _dim(call)
    axis = sole_axis(spec, dim)
    if axis is None or propagation.operands[0] is not spec.layout or _is_cut_in_name(spec, dim):
        return None
    return Broadcast(spec.mesh, axis, dim, spec.shape[dim], int(call.argument("index", 0)) % spec.shape[dim])


def _selected_parts(call: OpCall, propagation: Propagation) -> Compute:
    return call.op if _broadcast(call, propagation) is None else lambda moved, *_, **__: moved.view_as(moved)


def _fetch_element(call: OpCall, propagation: Propagation) -> Fetch | None:
    broadcast = _broadcast(call, propagation)
    return None if broadcast is None else Fetch(broadcast.read, broadcast.write)


def _select_backward(call: OpCall) -> Sequence[Signature]:
    num_dims = len(call.output_shape)
    return mapped(call, inverse(without(num_dims, {dim_of(call, "dim", num_dims)})))


def _select_backward_parts(call: OpCall, propagation: Propagation) -> Compute:
    return with_argument(call, "input_sizes", result_spec(call, propagation).local_shape)


def _is_along_whole(call: OpCall) -> bool:
    """True where no axis cuts the dim: a part's elements are then the same as the whole's."""
    dim = _dim(call)
    return all(placement.cut_dim != dim for placement in call.operand.placements)


_SLICES = Rule(_sliced, _sliced_parts, fetch=_fetch_slices, goes_by_layout=True, computes_by_layout=_is_along_whole)

RULES: dict[str, Rule] = {
    "aten.select": Rule(
        _selected, _selected_parts, fetch=_fetch_element, goes_by_layout=True, computes_by_layout=_is_along_whole
    ),
    "aten.select_backward": Rule(_select_backward, _select_backward_parts),
    "aten.slice": _SLICES,
    "aten.slice_backward": Rule(_slice_backward, _slice_backward_parts),
    "aten.split": _SLICES,
    "aten.split_with_sizes": _SLICES,
    "aten.unsafe_split": _SLICES,
    "aten.unsafe_split_with_sizes": _SLICES,
}
