"""Rules x layouts -> which layout each operand must have and the result has then. Pure; one mesh axis at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from disttrain.dtensor.layout import Layout, Spec
from disttrain.dtensor.placement import Partial, Placement, Replicate, Shard
from disttrain.dtensor.rules import OpCall, Signature

_IMPOSSIBLE = math.inf


@dataclass(frozen=True)
class Propagation:
    """Layouts for the operands (None for plain scalars) and the result of one operator call."""

    operands: tuple[Layout | None, ...]
    result: Layout


def propagate(call: OpCall, signatures: Sequence[Signature]) -> Propagation | None:
    """The cheapest choice of one signature per axis; None when an in-place call leaves none."""
    mesh = next(spec.mesh for spec in call.operands if spec is not None)
    chosen: list[Signature] = []
    for axis, axis_size in enumerate(mesh.shape):
        costs = [_cost(call, signature, axis, axis_size) for signature in signatures]
        best = min(range(len(costs)), key=costs.__getitem__)
        if costs[best] == _IMPOSSIBLE:
            return None
        chosen.append(signatures[best])
    operands = tuple(
        None if spec is None else Layout(mesh, tuple(signature.operands[place] for signature in chosen))
        for place, spec in enumerate(call.operands)
    )
    return Propagation(operands, Layout(mesh, tuple(signature.result for signature in chosen)))


def _cost(call: OpCall, signature: Signature, axis: int, axis_size: int) -> float:
    """Bytes that this rank would send and receive, and a little for copies, so that ties go to moving nothing."""
    first = call.operands[0]
    if call.facts.is_inplace and first is not None and first.placements[axis] != signature.operands[0]:
        return _IMPOSSIBLE
    return sum(
        _redistribution_cost(spec, spec.placements[axis], wanted, axis_size)
        for spec, wanted in zip(call.operands, signature.operands, strict=True)
        if spec is not None
    )


def _redistribution_cost(spec: Spec, placement: Placement, wanted: Placement, axis_size: int) -> float:
    if placement == wanted:
        return 0.0
    # Even along an axis of one rank, where nothing moves, a change is not free: it would cut a view off.
    num_bytes = max(1, math.prod(spec.shape)) * spec.dtype.itemsize
    moved = num_bytes * (axis_size - 1) / axis_size
    copied = num_bytes / axis_size / 16
    match placement, wanted:
        case Replicate(), _:
            return copied
        case Shard(), Partial():
            return moved + copied
        case Shard(), _:
            return moved + copied / 2
        case Partial(), Shard():
            return moved + copied
        case _:
            return 2 * moved + copied
