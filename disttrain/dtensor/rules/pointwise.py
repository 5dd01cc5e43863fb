"""Operators that compute each element from the elements at the same place, after broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.dtensor.layout import Spec
from disttrain.dtensor.placement import Partial, Placement, Replicate, Shard
from disttrain.dtensor.rules.base import OpCall, Rule, Signature, all_replicated

COPIES = frozenset(
    {
        "aten._to_copy",
        "aten.alias",
        "aten.clone",
        "aten.copy_",
        "aten.detach",
        "aten.empty_like",
        "aten.fill_",
        "aten.full_like",
        "aten.lift_fresh",
        "aten.ones_like",
        "aten.zero_",
        "aten.zeros_like",
    }
)
"""Pointwise as well, though torch does not tag them so."""

_EVERY_OPERAND = frozenset(
    {
        "aten.add",
        "aten.add_",
        "aten.copy_",
        "aten.empty_like",
        "aten.neg",
        "aten.neg_",
        "aten.sub",
        "aten.sub_",
        "aten.zero_",
        "aten.zeros_like",
    }
)
"""f(sum of x, sum of y) = sum of f(x, y): partial operands give a partial result."""

_IDENTITIES = frozenset({"aten.alias", "aten.clone", "aten.detach"})
"""The same values: whatever is partial stays so."""

_FIRST_OPERAND = frozenset({"aten.div", "aten.div_", "aten.mul", "aten.mul_"})
"""f(sum of x, c) = sum of f(x, c): linear in the first operand alone."""


def pointwise(call: OpCall) -> Sequence[Signature]:
    """Any dim may be sharded, in all operands alike; an operand that is broadcast along it is whole."""
    num_dims = len(call.output_shape)
    sharded = [
        Signature.of(
            [_operand(spec, dim, call.output_shape) for spec in call.operands], *(Shard(dim),) * len(call.outputs)
        )
        for dim in range(num_dims)
    ]
    return [all_replicated(call), *sharded, *_partial(call)]


def _operand(spec: Spec | None, dim: int, output_shape: tuple[int, ...]) -> Placement:
    """What an operand must be so that the result is sharded along output dim `dim`."""
    if spec is None:
        return Replicate()
    own_dim = dim - (len(output_shape) - len(spec.shape))
    is_broadcast = own_dim < 0 or (spec.shape[own_dim] == 1 and output_shape[dim] != 1)
    return Replicate() if is_broadcast else Shard(own_dim)


def _partial(call: OpCall) -> list[Signature]:
    name, num_operands = call.facts.name, len(call.operands)
    if name in _IDENTITIES and call.operands[0] is not None:
        kinds = {place for place in call.operands[0].placements if isinstance(place, Partial)}
        return [Signature.of((kind,), kind) for kind in sorted(kinds, key=repr)]
    if name in _EVERY_OPERAND and all(spec is not None for spec in call.operands) and not _adds_a_number(call):
        partial = Partial("sum")
        return [Signature.of((partial,) * num_operands, partial)]
    if name in _FIRST_OPERAND and call.operands[0] is not None and call.argument("rounding_mode") is None:
        others: tuple[Placement, ...] = (Replicate(),) * (num_operands - 1)
        return [Signature.of((Partial(op), *others), Partial(op)) for op in ("sum", "avg")]
    return []


def _adds_a_number(call: OpCall) -> bool:
    """True for `x + 1`: each rank would add it."""
    return call.facts.name in ("aten.add", "aten.add_", "aten.sub", "aten.sub_") and len(call.operands) < 2


POINTWISE = Rule(pointwise)
