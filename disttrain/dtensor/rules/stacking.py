"""Operators that put tensors of one shape side by side."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.dtensor.placement import NormPartial, Partial, Placement, Shard
from disttrain.dtensor.rules.base import OpCall, Rule, Signature, all_replicated


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
    present: list[Placement] = [place for spec in specs for place in spec.placements]
    kinds = {place for place in present if isinstance(place, Partial)}
    # Any value is a sum, but only another norm is sure to be a norm: what is negative is none.
    return [
        kind
        for kind in sorted(kinds, key=repr)
        if not isinstance(kind, NormPartial) or all(kind in spec.placements for spec in specs)
    ]


RULES = {"aten.stack": Rule(stack)}
