"""as_strided: places counted in memory, which only a whole in one piece has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated
from disttrain.dtensor.rules.dim_maps import mapped, unchanged
from disttrain.dtensor.spec.shard_sizes import contiguous_strides
from disttrain.dtensor.views.counted_places import check_begins_there, counts_from_start
from disttrain.dtensor.views.view_copy import Fetch
from disttrain.errors import LayoutError


def _signatures(call: OpCall) -> Sequence[Signature]:
    """A tensor as it lies passes; anything else must be in one piece."""
    spec = call.operand
    if _is_as_it_lies(call):
        return mapped(call, unchanged(len(spec.shape)))
    size, stride = call.argument("size"), call.argument("stride")
    last = call.argument("storage_offset", 0)
    last += sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if spec.stride != contiguous_strides(spec.shape) or last >= torch.Size(spec.shape).numel():
        raise LayoutError(
            call.facts.name,
            f"places are counted beyond a tensor of shape {spec.shape} and strides {spec.stride}, "
            "whose memory is spread over the ranks.",
            "Use views that name dims, or take as_strided of a contiguous tensor.",
            rank=spec.mesh.world.rank,
        )
    return [all_replicated(call), *mapped(call, {})[1:]]


def _is_as_it_lies(call: OpCall) -> bool:
    size, stride = tuple(call.argument("size")), tuple(call.argument("stride"))
    return (size, stride) == (call.operand.shape, call.operand.stride) and not _counts_from_start(call)


def _counts_from_start(call: OpCall) -> bool:
    return counts_from_start(call.facts, call.arguments, call.keywords)


def _fetch(call: OpCall, propagation: Propagation) -> Fetch | None:
    """As for any view that moves, but that the ranks first see whether places count from where the tensor begins."""
    spec, layout = call.operand, propagation.operands[0]
    if layout is None or layout is spec.layout or not _counts_from_start(call):
        return None
    moved, name = spec.with_layout(layout), call.facts.name

    def read(part: torch.Tensor) -> torch.Tensor:
        check_begins_there(name, part, spec)
        return redistribute_local(part, spec, layout)

    def write(values: torch.Tensor, part: torch.Tensor) -> None:
        part.copy_(redistribute_local(values, moved, spec.layout))

    return Fetch(read, write)


def _parts(call: OpCall, propagation: Propagation) -> Compute:
    if _is_as_it_lies(call):
        return lambda part, *_, **__: part.view_as(part)
    op, spec, name = call.op, call.operand, call.facts.name
    size, stride = tuple(call.argument("size")), tuple(call.argument("stride"))
    offset = call.argument("storage_offset", 0)
    must_begin = _counts_from_start(call) and propagation.operands[0] is spec.layout

    def compute(part: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if must_begin:
            check_begins_there(name, part, spec)
        if not part.is_contiguous():
            raise RuntimeError("as_strided counts places in contiguous memory")
        view: torch.Tensor = op(part, size, stride, part.storage_offset() + offset)
        return view

    return compute


RULES = {"aten.as_strided": Rule(_signatures, _parts, fetch=_fetch)}
