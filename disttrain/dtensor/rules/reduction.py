"""Operators that reduce dims: a sharded dim that is reduced leaves a partial result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor.rules.base import (
    Compute,
    OpCall,
    Propagation,
    Rule,
    Signature,
    all_replicated,
    always,
    result_specs,
)
from disttrain.dtensor.rules.parts import highest, kept, lowest, operand_part, partials_of
from disttrain.dtensor.spec.placement import NormPartial, Partial, Placement, Shard

_SUM, _MAX, _MIN = Partial("sum"), Partial("max"), Partial("min")

_PARTIALS: dict[str, tuple[Partial, ...]] = {
    "aten.all": (_MIN,),
    "aten.amax": (_MAX,),
    "aten.amin": (_MIN,),
    "aten.aminmax": (_MIN, _MAX),
    "aten.any": (_MAX,),
    "aten.count_nonzero": (_SUM,),
    "aten.max": (_MAX,),
    "aten.mean": (_SUM,),
    "aten.min": (_MIN,),
    "aten.nansum": (_SUM,),
    "aten.prod": (Partial("product"),),
    "aten.sum": (_SUM,),
}
"""The placement of each result if a reduced dim is sharded."""

_NORMS = frozenset({"aten.linalg_vector_norm", "aten.norm"})

_TAKEN = {
    "aten.amax": ("max",),
    "aten.amin": ("min",),
    "aten.max": ("max",),
    "aten.mean": ("sum", "avg"),
    "aten.min": ("min",),
    "aten.sum": ("sum", "avg"),
}
"""Reductions over ranks that may as well come after the operator; of truth values only `any` and `all` have some.

Not products: of factors that lie on several ranks, those of one may overflow and those of another vanish, which
together is nan, where each element of the whole is a small number.
"""


def reduction(call: OpCall) -> Sequence[Signature]:
    """Shard a dim that stays, or one that is reduced; reduce what is partial in the same way already."""
    num_dims = len(call.operand.shape)
    removed = reduced_dims(call)
    # The norm of norms could be partial again. Each use of it would reduce it anew: clipping does, and then whoever
    # looks at it.
    partials = () if _is_of_norms(call) else _partials(call)
    signatures = [all_replicated(call)]
    signatures += [Signature.of((kind,), *[kind] * len(call.outputs)) for kind in _taken(call)]
    for dim in range(num_dims):
        if dim not in removed:
            signatures.append(Signature.of((Shard(dim),), *_where_kept(call, dim, removed)))
        elif partials:
            signatures.append(Signature.of((Shard(dim),), *partials))
    return signatures


def localize(call: OpCall, propagation: Propagation) -> Compute:
    """The operator itself, but for parts that are empty where the whole is not, and for means of parts."""
    part = operand_part(call, propagation, 0)
    removed = reduced_dims(call)
    global_count = math.prod(part.shape[dim] for dim in removed)
    local_count = math.prod(part.local_shape[dim] for dim in removed)
    if local_count == global_count:
        return call.op
    if local_count == 0:
        return _neutral(call, propagation)
    if call.facts.name != "aten.mean":
        return call.op
    weight = local_count / global_count

    def weighted_mean(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mean: torch.Tensor = call.op(local, *args, **kwargs)
        return mean.mul_(weight)

    return weighted_mean


def reduced_dims(call: OpCall) -> frozenset[int]:
    """The dims that the call reduces."""
    num_dims = len(call.operand.shape)
    dims = call.argument("dim")
    if isinstance(dims, int):
        return frozenset({dims % num_dims} if num_dims else ())
    if dims:
        return frozenset(dim % num_dims for dim in dims if num_dims)
    return frozenset() if dims is not None and num_dims and not _reduces_all(call) else frozenset(range(num_dims))


def _reduces_all(call: OpCall) -> bool:
    """True where an empty list of dims stands for every dim, as for most operators; for some it stands for none.

    The meta device tells, by sizes of two: where all sizes are one, both look alike.
    """
    probe = torch.empty((2,) * len(call.operand.shape), dtype=call.operand.dtype, device="meta")
    results = call.op(probe, *call.arguments[1:], **call.keywords)
    first: torch.Tensor = results if isinstance(results, torch.Tensor) else results[0]
    return first.shape != probe.shape


def keeps_dims(call: OpCall) -> bool:
    return bool(call.argument("keepdim", False))


def _where_kept(call: OpCall, dim: int, removed: frozenset[int]) -> list[Placement]:
    """The results' placements where dim `dim` of the operand, which they keep, is cut."""
    return [Shard(dim if keeps_dims(call) else kept(dim, removed))] * len(call.outputs)


def _partials(call: OpCall) -> tuple[Partial, ...]:
    """The results' placements where a reduced dim is cut; none where it must not be."""
    name = call.facts.name
    if name in _NORMS:
        order = _order(call)
        if order == 0:
            return (_SUM,)
        if order == float("-inf"):
            return (_MIN,)
        return (NormPartial(order=order),) if order > 0 else ()
    if name == "aten.prod" and call.outputs[0].dtype.is_complex:
        return ()  # what a backend multiplies is real
    return _PARTIALS[name]


def _is_of_norms(call: OpCall) -> bool:
    return call.facts.name in _NORMS and any(isinstance(kind, NormPartial) for kind in partials_of(call, 0))


def _order(call: OpCall) -> float:
    return float(call.argument("ord" if call.facts.name == "aten.linalg_vector_norm" else "p", 2))


def _taken(call: OpCall) -> list[Partial]:
    """The kinds of Partial that the operand may be in, and the result is in then."""
    source, target = call.operand.dtype, call.outputs[0].dtype
    if call.facts.name in _NORMS:
        return []
    if source == torch.bool:
        taken: tuple[str, ...] = {"aten.any": ("max",), "aten.all": ("min",)}.get(call.facts.name, ())
    elif torch.promote_types(source, target) == target:
        taken = _TAKEN.get(call.facts.name, ())
    else:
        taken = ()  # it rounds before it sums
    return [kind for kind in partials_of(call, 0) if kind.reduce_op in taken]


def _neutral(call: OpCall, propagation: Propagation) -> Compute:
    """Parts of results that change nothing, for a rank that has no elements to reduce."""
    parts = result_specs(call, propagation)
    values = [_neutral_value(kind, part.dtype) for kind, part in zip(_partials(call), parts, strict=True)]

    def compute(local: torch.Tensor, *_: Any, **__: Any) -> Any:
        made = tuple(
            local.new_full(part.local_shape, value, dtype=part.dtype) for part, value in zip(parts, values, strict=True)
        )
        return made if len(made) > 1 else made[0]

    return compute


def _neutral_value(kind: Partial, dtype: torch.dtype) -> float | int | bool:
    match kind.reduce_op:
        case "max":
            return lowest(dtype)
        case "min":
            return highest(dtype)
        case "product":
            return 1
        case _:
            return 0


_RULE = Rule(reduction, localize, goes_by_layout=True, computes_by_layout=always)
_BY_ORDER = Rule(reduction, localize, reads_numbers=True)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_PARTIALS.keys() - {"aten.max", "aten.min"}, _RULE),
    **dict.fromkeys(("aten.max.default", "aten.min.default"), _RULE),
    **dict.fromkeys(_NORMS, _BY_ORDER),
}
