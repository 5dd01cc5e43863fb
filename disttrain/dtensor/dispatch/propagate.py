"""Rules x layouts -> which layout each operand must have and the results have then. Pure; one mesh axis at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from disttrain.dtensor._torch import hint_of
from disttrain.dtensor.rules import OpCall, Propagation, Rule, Signature
from disttrain.dtensor.spec.layout import Layout
from disttrain.dtensor.spec.placement import Partial, Placement, Replicate, Shard, StridedShard
from disttrain.dtensor.spec.shard_sizes import num_blocks
from disttrain.pieces import piece_size


def propagate(call: OpCall, rule: Rule) -> Propagation:
    """The cheapest choice of one signature per axis."""
    specs = [spec for spec in call.operands if spec is not None]
    mesh = specs[0].mesh
    signatures = rule.signatures(call)
    if len(specs) < len(call.operands):
        signatures = [signature for signature in signatures if not _adds_up_plain(call, signature)]
    may_mix = len(mesh.shape) > 1 and any(spec.layout.has_partial for spec in specs)
    # Even along an axis of one rank, where nothing moves, a change of placement is not free: the result would no longer
    # be a view.
    num_bytes = [0 if spec is None else max(1, math.prod(spec.shape)) * spec.dtype.itemsize for spec in call.operands]
    # What the axes so far leave of each operand.
    remaining = [None if spec is None else list(spec.shape) for spec in call.operands]
    chosen: list[Signature] = []
    for axis, axis_size in enumerate(mesh.shape):
        present = [None if spec is None else spec.placements[axis] for spec in call.operands]
        possible = [
            (_cost(call, signature, present, num_bytes, axis_size), signature)
            for signature in (*signatures, *(_blockwise(call, signatures, chosen) if rule.takes_blocks else ()))
            if signature.holds_along(axis, axis_size) and not (may_mix and _mixes(call, signature, axis))
        ]
        best = _cheapest(possible, None if rule.shards_unevenly else remaining, axis_size)
        chosen.append(best)
        for sizes, placement in zip(remaining, best.operands, strict=True):
            if sizes is not None and placement.cut_dim is not None:
                sizes[placement.cut_dim] = piece_size(sizes[placement.cut_dim], axis_size)
    operands = tuple(
        None if spec is None else Layout(mesh, [signature.operands[index] for signature in chosen])
        for index, spec in enumerate(call.operands)
    )
    results = tuple(
        Layout(mesh, [signature.results[index] for signature in chosen]) for index in range(len(call.outputs))
    )
    return Propagation(operands, results)


def _blockwise(call: OpCall, signatures: Sequence[Signature], chosen: Sequence[Signature]) -> Iterable[Signature]:
    """The signatures that cut a dim, for operands in which the next axis cuts that dim block by block. It does not
    matter which elements a rank has, as long as they are the same in all operands.

    Blocks are counted in the piece that earlier axes leave of the dim, so those axes must keep their cuts."""
    axis = len(chosen)
    for index, spec in enumerate(call.operands):
        present = None if spec is None else spec.placements[axis]
        if isinstance(present, StridedShard) and spec is not None:
            earlier = zip(spec.placements, [signature.operands[index] for signature in chosen], strict=False)
            if any(old != new and present.dim in (old.cut_dim, new.cut_dim) for old, new in earlier):
                continue
            for signature in signatures:
                if signature.operands[index] == Shard(present.dim):
                    yield replace(
                        signature,
                        operands=tuple(_in_blocks(placement, present) for placement in signature.operands),
                        results=tuple(_in_blocks(placement, present) for placement in signature.results),
                    )


def _in_blocks(placement: Placement, present: StridedShard) -> Placement:
    return replace(present, dim=placement.dim) if isinstance(placement, Shard) else placement


def _is_even(signature: Signature, remaining: Sequence[list[int] | None], axis_size: int) -> bool:
    return not any(
        sizes[placement.cut_dim] % (axis_size * num_blocks(placement))
        for sizes, placement in zip(remaining, signature.operands, strict=True)
        if sizes is not None and placement.cut_dim is not None
    )


def _mixes(call: OpCall, signature: Signature, axis: int) -> bool:
    """True where an operand that is partial in one way along another axis would become partial in a second way.

    The value of such a tensor depends on which axis is reduced first: the neutral element of a product is not that of a
    sum.
    """
    return any(
        isinstance(wanted, Partial)
        and spec is not None
        and spec.placements[axis] != wanted
        and any(isinstance(other, Partial) and other != wanted for other in spec.placements)
        for spec, wanted in zip(call.operands, signature.operands, strict=True)
    )


def _cheapest(
    possible: Sequence[tuple[int, Signature]], remaining: Sequence[list[int] | None] | None, axis_size: int
) -> Signature:
    """The first of those with the lowest cost. If the `remaining` sizes of the operands are given, only those that cut
    them evenly count.

    If costs are symbols, the choice is made for the sizes at hand, and each comparison becomes a guard of the compiled
    graph. So all ranks choose alike, whichever sizes they compiled for. Fewer comparisons are better.
    """
    ranking = sorted(range(len(possible)), key=lambda index: hint_of(possible[index][0]))
    for rank, index in enumerate(ranking):
        cost, signature = possible[index]
        if remaining is None or _is_even(signature, remaining, axis_size):
            for other in ranking[rank + 1 :] if hint_of(cost) else ():
                other_cost = possible[other][0]
                if not (cost < other_cost if other < index else cost <= other_cost):
                    raise AssertionError("costs are not what they were")
            return signature
    raise AssertionError("whole operands always will do")


def _adds_up_plain(call: OpCall, signature: Signature) -> bool:
    """True where a plain scalar, which every rank has, would count once for each rank."""
    return any(
        spec is None and isinstance(wanted, Partial)
        for spec, wanted in zip(call.operands, signature.operands, strict=True)
    )


def _cost(
    call: OpCall,
    signature: Signature,
    present: Sequence[Placement | None],
    num_bytes: Sequence[int],
    axis_size: int,
) -> int:
    """The cost of a signature: bytes that this rank sends and receives, and a little for copies, so that ties go to
    moving nothing.

    A factor makes it a whole number; it is the same for all signatures.
    """
    cost = 0
    for old, new, size in zip(present, signature.operands, num_bytes, strict=True):
        if old is not None and old != new:
            cost += size * _change(type(old), type(new), axis_size)
    if call.facts.is_inplace and not call.facts.changes_shape and present and (written := present[0]) is not None:
        # The result has to be brought to the layout of the tensor it is written to.
        made = signature.results[0]
        if made != written:
            cost += num_bytes[0] * _change(type(made), type(written), axis_size)
    return cost


@cache
def _change(old: type[Placement], new: type[Placement], axis_size: int) -> int:
    """The cost of turning one placement into another, per byte of the whole tensor."""
    # A copied byte counts a sixteenth of one that moves.
    copied = 2 * axis_size
    moved_piece = 32 * (axis_size - 1)
    moved = moved_piece * axis_size
    is_cut, is_cut_after = issubclass(old, _CUTS), issubclass(new, _CUTS)
    if issubclass(old, Replicate):
        return copied
    if is_cut and is_cut_after:
        return moved_piece + 2 * copied
    if is_cut:
        # Where one rank has it all, ties go to the cut, as along other axes: what follows then lies alike.
        return moved + (copied if issubclass(new, Partial) or axis_size == 1 else axis_size) + (axis_size == 1)
    return (moved if is_cut_after else 2 * moved) + copied


_CUTS: Final = (Shard, StridedShard)
