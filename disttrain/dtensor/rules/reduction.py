"""Operators that reduce dims: a sharded dim that is reduced leaves a partial result."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.dtensor.placement import NormPartial, Partial, Placement, Shard
from disttrain.dtensor.rules.base import OpCall, Rule, Signature, all_replicated

_PARTIALS = {
    "aten.amax": Partial("max"),
    "aten.amin": Partial("min"),
    "aten.max": Partial("max"),
    "aten.mean": Partial("avg"),
    "aten.min": Partial("min"),
    "aten.prod": Partial("product"),
    "aten.sum": Partial("sum"),
}
REDUCTIONS = frozenset({*_PARTIALS, "aten.linalg_vector_norm"})


def reduction(call: OpCall) -> Sequence[Signature]:
    """Shard a dim that stays, or one that is reduced; reduce what is partial in the same way already."""
    num_dims = len(call.operand.shape)
    reduced = _reduced_dims(call, num_dims)
    partial = _partial(call)
    signatures = [all_replicated(call), Signature.of((partial,), partial)]
    for dim in range(num_dims):
        if dim not in reduced:
            signatures.append(Signature.of((Shard(dim),), _kept(call, dim, reduced)))
        elif _may_be_cut(partial):
            signatures.append(Signature.of((Shard(dim),), partial))
    return signatures


def is_reduction(call: OpCall) -> bool:
    """True for the overloads that return one tensor: `max` with a dim returns places too."""
    return call.facts.name in REDUCTIONS and not (
        call.facts.name in ("aten.max", "aten.min") and len(call.arguments) > 1
    )


def _partial(call: OpCall) -> Partial:
    if call.facts.name == "aten.linalg_vector_norm":
        return NormPartial(order=float(call.argument("ord", 2)))
    return _PARTIALS[call.facts.name]


def _reduced_dims(call: OpCall, num_dims: int) -> frozenset[int]:
    dims = call.argument("dim")
    named = (dims,) if isinstance(dims, int) else tuple(dims or ())
    # No dims named means all of them; a scalar has none, though dim 0 may be named.
    return frozenset(dim % num_dims for dim in named if num_dims) if named else frozenset(range(num_dims))


def _kept(call: OpCall, dim: int, reduced: frozenset[int]) -> Placement:
    """Where dim `dim` of the operand is in the result."""
    if call.argument("keepdim", False):
        return Shard(dim)
    return Shard(dim - sum(1 for other in reduced if other < dim))


def _may_be_cut(partial: Partial) -> bool:
    """A mean needs equal pieces, and an extremum needs one on every rank; sums, products and norms need neither."""
    if isinstance(partial, NormPartial):
        return 0.0 < partial.order < float("inf")
    return partial.reduce_op in ("sum", "product")


REDUCTION = Rule(reduction, reads_numbers=True)
