"""Operators along a dim whose elements must be together: that dim is whole, any other may be cut."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.dtensor.rules.base import OpCall, Rule, Signature, all_replicated
from disttrain.dtensor.rules.parts import kept, partials_of
from disttrain.dtensor.spec.placement import Placement, Replicate, Shard

_LAST = -1

_DIMS: dict[str, int | None] = {
    "aten.argsort": _LAST,
    "aten.cummax": None,
    "aten.cummin": None,
    "aten.cumprod": None,
    "aten.cumsum": None,
    "aten.glu": _LAST,
    "aten.glu_backward": None,
    "aten.kthvalue": _LAST,
    "aten.logcumsumexp": None,
    "aten.median.dim": None,
    "aten.mode": _LAST,
    "aten.nanmedian.dim": None,
    "aten.sort": _LAST,
    "aten.topk": _LAST,
}
"""The dim where none is named; None: one must be."""


def along_a_dim(call: OpCall) -> Sequence[Signature]:
    """The results have the operands' dims, with or without the ordered one."""
    num_dims = len(call.operand.shape)
    default = _DIMS.get(call.facts.name, _LAST)
    ordered = int(call.argument("dim", default)) % max(1, num_dims)
    is_removed = len(call.output_shape) < num_dims
    signatures = [all_replicated(call)]
    for dim in range(num_dims):
        if dim != ordered:
            placement = Shard(kept(dim, {ordered}) if is_removed else dim)
            operands = (Shard(dim),) * len(call.operands)
            signatures.append(Signature.of(operands, *[placement] * len(call.outputs)))
    if call.facts.name in ("aten.cumsum", "aten.cumsum_") and call.outputs[0].dtype.is_floating_point:
        signatures += [Signature.of((kind,), kind) for kind in partials_of(call, 0) if kind.reduce_op in ("sum", "avg")]
    return signatures


def searchsorted(call: OpCall) -> Sequence[Signature]:
    """Cuts the values to look up along any dim; many sorted rows are cut like them, but whole along the last dim."""
    rows, sought = call.operands[0], call.operands[1] if len(call.operands) > 1 else None
    signatures = [all_replicated(call)]
    if rows is None or sought is None:
        return signatures
    num_dims = len(sought.shape)
    for dim in range(num_dims):
        by_rows: Placement = Shard(dim) if len(rows.shape) > 1 and dim < num_dims - 1 else Replicate()
        # A sorter, which comes last, lies as the rows do.
        others = [by_rows] * (len(call.operands) - 2)
        signatures.append(Signature.of((by_rows, Shard(dim), *others), Shard(dim)))
    return signatures


def each_element(call: OpCall) -> Sequence[Signature]:
    """The first operand, in any way; what its elements are compared with is whole."""
    signatures = [all_replicated(call)]
    if call.operands[0] is None or call.operand.shape != call.output_shape:
        return signatures
    others = [Replicate()] * (len(call.operands) - 1)
    return [
        *signatures,
        *(Signature.of((Shard(dim), *others), Shard(dim)) for dim in range(len(call.operand.shape))),
    ]


_RULE = Rule(along_a_dim)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_DIMS, _RULE),
    "aten.bucketize.Tensor": Rule(each_element),
    "aten.isin.Tensor_Scalar": Rule(each_element),
    "aten.isin.Tensor_Tensor": Rule(each_element),
    "aten.searchsorted.Tensor": Rule(searchsorted),
}
