"""Rules of views and their relatives: a dim of the operand is a dim of the result, or cannot be cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Signature, all_replicated
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Partial, Placement, Replicate, Shard

DimMap = Mapping[int, int]
"""Operand dim -> result dim, for the dims that may be cut: each rank then holds the same places of both."""

LINEAR = frozenset({"sum", "avg"})
"""Reductions that commute with every linear operator. Copying elements commutes with all reductions."""


def dim_of(call: OpCall, name: str, num_dims: int, default: int = 0) -> int:
    """The argument called `name`, a dim, counted from the front."""
    return int(call.argument(name, default)) % max(num_dims, 1)


def mapped(call: OpCall, dims: DimMap, reductions: Collection[str] | None = None) -> list[Signature]:
    """Signatures of an operator with one operand that may be cut along the keys of `dims`, and may be partial: by any
    reduction, or by those given."""
    num_results = len(call.outputs)
    signatures = [all_replicated(call)]
    signatures += [Signature.of((Shard(dim),), *[Shard(into)] * num_results) for dim, into in dims.items()]
    signatures += [
        Signature((Shard(dim),), (Replicate(),) * num_results, for_one_rank=True)
        for dim in range(len(call.operand.shape))
        if dim not in dims
    ]
    signatures += [
        Signature.of((partial,), *[partial] * num_results)
        for partial in partials_of(call.operand)
        if reductions is None or partial.reduce_op in reductions
    ]
    return signatures


def partials_of(spec: Spec) -> list[Partial]:
    """The kinds of Partial that `spec` has, in an order that is the same on all ranks."""
    kinds: set[Placement] = set(spec.placements)
    return sorted((kind for kind in kinds if isinstance(kind, Partial)), key=repr)


def unchanged(num_dims: int, blocked: Collection[int] = ()) -> dict[int, int]:
    """Every dim to itself, but for those that cannot be cut."""
    return {dim: dim for dim in range(num_dims) if dim not in blocked}


def without(num_dims: int, removed: Collection[int]) -> dict[int, int]:
    """The dims that are left when those in `removed` go, and their new positions."""
    remaining = [dim for dim in range(num_dims) if dim not in removed]
    return {dim: position for position, dim in enumerate(remaining)}


def inverse(dims: DimMap) -> dict[int, int]:
    return {into: dim for dim, into in dims.items()}


def result_spec(call: OpCall, propagation: Propagation) -> Spec:
    """The spec of the first result."""
    output = call.outputs[0]
    return Spec.of(propagation.results[0], tuple(output.shape), output.dtype)


def with_argument(call: OpCall, name: str, value: Any) -> Compute:
    """The operator, with the argument called `name` replaced."""
    op, position = call.op, call.facts.arguments.index(name)

    def compute(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            return op(*args, **{**kwargs, name: value})
        return op(*args[:position], value, *args[position + 1 :], **kwargs)

    return compute


def with_local_size(name: str) -> Callable[[OpCall, Propagation], Compute]:
    """For operators whose argument called `name` is the result's shape: the part's, on the parts."""
    return lambda call, propagation: with_argument(call, name, result_spec(call, propagation).local_shape)
