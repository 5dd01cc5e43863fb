"""Operators that copy elements to other places, and leave some out or put some in."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature
from disttrain.dtensor.rules.dim_maps import LINEAR, inverse, mapped, unchanged, without
from disttrain.dtensor.spec.layout import Layout
from disttrain.dtensor.spec.placement import Shard, StridedShard


def _moved_dims(call: OpCall) -> Sequence[Signature]:
    """flip and roll: the dims named must be whole; roll without dims looks at the tensor as flat."""
    num_dims = len(call.operand.shape)
    dims = call.argument("dims", ())
    named = {dim % num_dims for dim in ((dims,) if isinstance(dims, int) else dims) if num_dims}
    is_flat = call.facts.name == "aten.roll" and not named
    return mapped(call, unchanged(num_dims, range(num_dims) if is_flat else named))


def _repeat(call: OpCall) -> Sequence[Signature]:
    """A dim cut and repeated is as many blocks: every rank repeats its piece."""
    spec = call.operand
    repeats = call.argument("repeats")
    shift = len(repeats) - len(spec.shape)
    signatures = mapped(call, {dim: dim + shift for dim in range(len(spec.shape)) if repeats[dim + shift] == 1})
    for dim in range(len(spec.shape)):
        count = repeats[dim + shift]
        if count > 1:
            signatures.append(Signature.of((Shard(dim),), StridedShard(dim + shift, count)))
    for placement in set(spec.placements):
        if isinstance(placement, StridedShard):
            into = placement.dim + shift
            count = placement.num_blocks * repeats[into]
            if count:
                signatures.append(Signature.of((placement,), StridedShard(into, count)))
    return signatures


def _shuffled_channels(call: OpCall) -> Sequence[Signature]:
    return mapped(call, unchanged(len(call.operand.shape), {1}))


def _diag_embed(call: OpCall) -> Sequence[Signature]:
    """The last dim becomes two; the others stay in their order."""
    num_dims = len(call.output_shape)
    planes = {int(call.argument("dim1", -2)) % num_dims, int(call.argument("dim2", -1)) % num_dims}
    return mapped(call, inverse(without(num_dims, planes)))


def _triangle(call: OpCall) -> Sequence[Signature]:
    return mapped(call, unchanged(len(call.operand.shape)))


def _triangle_parts(call: OpCall, propagation: Propagation) -> Compute:
    """The diagonal, counted from where this rank's rows and columns begin."""
    layout = propagation.operands[0]
    assert isinstance(layout, Layout)
    rows, columns = call.operand.with_layout(layout).local_offset[-2:]
    op, diagonal = call.op, call.argument("diagonal", 0) + rows - columns
    return lambda part, *_, **__: op(part, diagonal)


def _pad(call: OpCall) -> Sequence[Signature]:
    """The dims that are padded must be whole. Of parts of a sum, all would pad."""
    num_dims, pad = len(call.operand.shape), call.argument("pad")
    padded = {num_dims - 1 - position // 2 for position, amount in enumerate(pad) if amount}
    value = call.argument("value", 0)
    reductions = {*LINEAR, "min", "max", "product", "norm"} if value == 0 else {"avg", "min", "max"}
    return mapped(call, unchanged(num_dims, padded), reductions)


RULES: dict[str, Rule] = {
    "aten.channel_shuffle": Rule(_shuffled_channels),
    "aten.constant_pad_nd": Rule(_pad, reads_numbers=True),
    "aten.diag_embed": Rule(_diag_embed),
    "aten.flip": Rule(_moved_dims),
    "aten.repeat": Rule(_repeat, takes_blocks=False),
    "aten.roll": Rule(_moved_dims),
    "aten.tril": Rule(_triangle, _triangle_parts, takes_blocks=False),
    "aten.triu": Rule(_triangle, _triangle_parts, takes_blocks=False),
}
