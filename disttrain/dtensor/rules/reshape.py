"""Views that regroup dims: each placement is an edit of the list of factors that a dim stands for.

Dims fall into groups that keep their number of elements: (batch, sequence, hidden) -> (batch * sequence, heads, width)
has two. Within a group elements keep their order, so a cut is the same cut of the flat group on both sides: so many
blocks, each of them cut into pieces of so many elements. What a rank holds it holds in the same order, and views as the
whole is viewed. All axes are looked at together, from the first, since the next one cuts what it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature
from disttrain.dtensor.rules.dim_maps import mapped, result_spec, unchanged
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Placement, Replicate, Shard, StridedShard
from disttrain.dtensor.spec.shard_sizes import cut
from disttrain.pieces import piece_size


class _Group(NamedTuple):
    """Consecutive dims of the operand, and those of the result that stand for the same elements."""

    old: range
    new: range


class _Sizes(NamedTuple):
    """Sizes of some rank's parts of the operand and of the result, after the axes so far."""

    old: tuple[int, ...]
    new: tuple[int, ...]


def groups_of(old: Sequence[int], new: Sequence[int]) -> list[_Group]:
    """The smallest groups; no size may be 0."""
    groups = []
    old_end = new_end = 0
    while old_end < len(old) or new_end < len(new):
        old_start, new_start = old_end, new_end
        old_size, old_end = (old[old_end], old_end + 1) if old_end < len(old) else (1, old_end)
        new_size, new_end = (new[new_end], new_end + 1) if new_end < len(new) else (1, new_end)
        while old_size != new_size:
            if old_size < new_size:
                old_size *= old[old_end]
                old_end += 1
            else:
                new_size *= new[new_end]
                new_end += 1
        groups.append(_Group(range(old_start, old_end), range(new_start, new_end)))
    return groups


def reshape(call: OpCall) -> Propagation | None:
    """Keep what can stay; else cut another dim, where no axis cuts it yet; else gather."""
    if isinstance(call.argument("dtype"), torch.dtype):
        return None
    spec, new_shape = call.operand, call.output_shape
    if 0 in spec.shape:
        results = [Replicate() if placement.cut_dim is not None else placement for placement in spec.placements]
        return Propagation((spec.layout,), (spec.layout.with_placements(results),))
    groups = groups_of(spec.shape, new_shape)
    states = [_Sizes(spec.shape, new_shape)]
    wanted: list[Placement] = []
    results = []
    for axis, axis_size in enumerate(spec.mesh.shape):
        for candidate in _candidates(spec, axis):
            result = _passed(candidate, groups, states, axis_size)
            if result is not None:
                break
        else:
            candidate = result = Replicate()
        wanted.append(candidate)
        results.append(result)
        states = _after(states, candidate, result, axis_size)
    return Propagation((spec.layout.with_placements(wanted),), (spec.layout.with_placements(results),))


def _candidates(spec: Spec, axis: int) -> list[Placement]:
    """The placements that the operand may get along the axis, the best first."""
    present = spec.placements[axis]
    if present.cut_dim is None:
        return [present]
    taken = {placement.cut_dim for placement in spec.placements}
    return [present, *(Shard(dim) for dim in range(len(spec.shape)) if dim not in taken)]


def _passed(placement: Placement, groups: Sequence[_Group], states: list[_Sizes], axis_size: int) -> Placement | None:
    """The result's placement for the operand's, where it is one for all `states` that ranks may be in; else None."""
    dim = placement.cut_dim
    if dim is None:
        return placement
    group = next(group for group in groups if dim in group.old)
    for result in _cuts(placement, group, max(states)):
        if all(
            _flat_cut(placement, group.old, state.old, axis_size) == _flat_cut(result, group.new, state.new, axis_size)
            for state in states
        ):
            return result
    return None


def _cuts(placement: Placement, group: _Group, sizes: _Sizes) -> list[Placement]:
    """Placements of the result that have as many blocks as `placement` has in the group."""
    blocks, _ = _flat_cut(placement, group.old, sizes.old, 1)
    placements: list[Placement] = []
    before = 1
    for dim in group.new:
        if blocks % before == 0 and sizes.new[dim] % (blocks // before) == 0:
            num_blocks = blocks // before
            placements.append(Shard(dim) if num_blocks == 1 else StridedShard(dim, num_blocks))
        before *= sizes.new[dim]
    # Along an axis of one rank they all fit: the one that cuts as finely comes back as it was.
    grain = _grain(placement, group.old, sizes.old)
    return sorted(placements, key=lambda result: bool(_grain(result, group.new, sizes.new) != grain))


def _grain(placement: Placement, dims: range, sizes: Sequence[int]) -> int:
    """The elements of the group between which no axis, of however many ranks, would cut."""
    return math.prod(sizes[dim] for dim in dims if placement.cut_dim is not None and dim > placement.cut_dim)


def _flat_cut(placement: Placement, dims: range, sizes: Sequence[int], axis_size: int) -> tuple[int, int]:
    """A cut of a group as one of its elements in a row: (blocks, elements of the first rank's piece of a block)."""
    dim = placement.cut_dim
    assert dim is not None
    num_blocks = placement.num_blocks if isinstance(placement, StridedShard) else 1
    if sizes[dim] % num_blocks:
        return -1, -1
    outer = inner = 1
    for other in dims:
        if other < dim:
            outer *= sizes[other]
        elif other > dim:
            inner *= sizes[other]
    return outer * num_blocks, piece_size(sizes[dim] // num_blocks, axis_size) * inner


def _after(states: list[_Sizes], old: Placement, new: Placement, axis_size: int) -> list[_Sizes]:
    """The sizes that ranks may have once an axis has cut, but for those of ranks without an element."""
    if old.cut_dim is None or new.cut_dim is None:
        return states
    after: list[_Sizes] = []
    for sizes, position in product(states, range(axis_size)):
        state = _Sizes(
            _cut_at(sizes.old, old, axis_size, position),
            _cut_at(sizes.new, new, axis_size, position),
        )
        # No set: sizes that are a compiler's symbols have no hash.
        if 0 not in state.old and state not in after:
            after.append(state)
    return after or states


def _cut_at(sizes: tuple[int, ...], placement: Placement, axis_size: int, position: int) -> tuple[int, ...]:
    dim = placement.cut_dim
    assert dim is not None
    return (*sizes[:dim], cut(sizes[dim], placement, axis_size, position), *sizes[dim + 1 :])


def _bits_dims(call: OpCall) -> Sequence[Signature]:
    """A view of the bits as another dtype: its last dim may be cut where the elements are as large."""
    num_dims = len(call.operand.shape)
    is_resized = call.operand.shape != call.output_shape
    return mapped(call, unchanged(num_dims, {num_dims - 1} if is_resized else ()), ())


def _parts(call: OpCall, propagation: Propagation) -> Compute:
    shape = result_spec(call, propagation).local_shape
    dtype = call.argument("dtype")
    if isinstance(dtype, torch.dtype):
        # The strides of a part that is empty say nothing.
        return call.op if 0 not in shape else lambda part, *_: part.new_empty(shape, dtype=dtype)

    if call.facts.is_view:
        return lambda part, *_: part.view(shape)
    return lambda part, *_: part.reshape(shape)


_RESHAPE = Rule(_bits_dims, _parts, joint=reshape)

RULES: dict[str, Rule] = {"aten._reshape_alias": _RESHAPE, "aten._unsafe_view": _RESHAPE, "aten.view": _RESHAPE}
