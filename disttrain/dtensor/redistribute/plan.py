"""Plans a redistribution on one mesh: a list of steps along mesh axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from disttrain.dtensor.spec.placement import Partial, Placement, Placements, Replicate, Shard, StridedShard
from disttrain.dtensor.spec.shard_sizes import num_blocks

_SCATTERED = frozenset({"sum", "avg", "min", "max", "product"})
"""Reductions that a backend can reduce-scatter."""

_LINEAR = frozenset({Partial("sum"), Partial("avg")})


@dataclass(frozen=True)
class Step:
    """Abstract: a step along mesh axes `axes`, in their order, after which these have placement `result`."""

    axes: tuple[int, ...]

    @property
    def result(self) -> Placement:
        return Replicate()


@dataclass(frozen=True)
class AllGather(Step):
    """Put together the pieces of tensor dim `dim`, or of each of its blocks."""

    dim: int
    num_blocks: int = 1


@dataclass(frozen=True)
class AllReduce(Step):
    """Reduce the ranks' values as `partial` says."""

    partial: Partial


@dataclass(frozen=True)
class ReduceScatter(Step):
    """Reduce as `partial` says, and keep one's own piece of tensor dim `dim`."""

    dim: int
    partial: Partial

    @property
    def result(self) -> Placement:
        return Shard(self.dim)


@dataclass(frozen=True)
class AllToAll(Step):
    """Give away the pieces of tensor dim `dim` and get those of dim `source_dim` put together."""

    source_dim: int
    dim: int

    @property
    def result(self) -> Placement:
        return Shard(self.dim)


@dataclass(frozen=True)
class Split(Step):
    """Keep one's own piece of tensor dim `dim`, or of each of its blocks; moves nothing."""

    dim: int
    num_blocks: int = 1

    @property
    def result(self) -> Placement:
        return Shard(self.dim) if self.num_blocks == 1 else StridedShard(self.dim, self.num_blocks)


@dataclass(frozen=True)
class MakePartial(Step):
    """Let the first rank hold the value and the others the neutral element of `partial`; moves nothing."""

    partial: Partial

    @property
    def result(self) -> Placement:
        return self.partial


def plan_redistribute(source: Placements, target: Placements) -> tuple[Step, ...]:
    """Steps that turn placements `source` into `target`.

    Pieces nest in the order of the axes. So a dim is gathered from the last axis to the first, and cut from the first
    to the last. If an earlier axis of the same dim changes, a later axis that stays cut is gathered and cut again.
    """
    steps: list[Step] = []
    current = list(source)
    for axis in reversed(range(len(source))):
        placement = current[axis]
        dim = placement.cut_dim
        if dim is not None and _must_gather(axis, dim, source, target):
            if (exchange := _exchange(axis, source, target)) is not None:
                steps.append(exchange)
            else:
                steps.append(AllGather((axis,), dim, num_blocks(placement)))
            current[axis] = steps[-1].result
    for axis, placement in enumerate(current):
        wanted = target[axis]
        if isinstance(placement, Partial) and _must_reduce(axis, source, target):
            if isinstance(wanted, Shard) and placement.reduce_op in _SCATTERED:
                steps.append(ReduceScatter((axis,), wanted.dim, placement))
            else:
                steps.append(AllReduce((axis,), placement))
            current[axis] = steps[-1].result
        if isinstance(wanted, Shard | StridedShard) and current[axis] != wanted:
            steps.append(Split((axis,), wanted.dim, num_blocks(wanted)))
            current[axis] = wanted
    # From the last axis to the first, since reductions go from the first to the last: so neutral elements stay neutral.
    for axis, wanted in reversed(list(enumerate(target))):
        if isinstance(wanted, Partial) and current[axis] != wanted:
            steps.append(MakePartial((axis,), wanted))
    return tuple(steps)


def _must_reduce(axis: int, source: Placements, target: Placements) -> bool:
    """True if a partial axis changes, or a later one that is partial by another reduction: a tensor's value is defined
    by reducing its axes in their order."""
    return source[axis] != target[axis] or any(
        source[later] != target[later]
        and any(
            isinstance(placement, Partial) and not _commute(source[axis], placement)
            for placement in (source[later], target[later])
        )
        for later in range(axis + 1, len(source))
    )


def _commute(first: Placement, second: Placement) -> bool:
    """True when it makes no difference along which of two partial axes is reduced first."""
    return first == second or (first.is_partial() and second.is_partial() and {first, second} <= _LINEAR)


def merged(
    separate: Sequence[Step], source: Placements, shape: Sequence[int], mesh_shape: Sequence[int]
) -> tuple[Step, ...]:
    """The steps of a plan, with one in place of several that follow each other and do the same along other axes.

    Reductions of one kind make one over all their ranks. So do gathers of one dim, which has `shape[dim]` elements,
    where all its pieces are of one size: those of several axes are then pieces of one cut.
    """
    steps: list[Step] = []
    for step in separate:
        last = steps[-1] if steps else None
        if isinstance(step, AllReduce) and isinstance(last, AllReduce) and step.partial == last.partial:
            steps[-1] = AllReduce((*last.axes, *step.axes), step.partial)
        elif (
            isinstance(step, AllGather)
            and isinstance(last, AllGather)
            and (step.dim, step.num_blocks, last.num_blocks) == (last.dim, 1, 1)
            and _is_even(step.dim, source, shape, mesh_shape)
        ):
            steps[-1] = AllGather((*step.axes, *last.axes), step.dim)
        else:
            steps.append(step)
    return tuple(steps)


def _is_even(dim: int, placements: Placements, shape: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    cuts = [size for size, placement in zip(mesh_shape, placements, strict=True) if placement.cut_dim == dim]
    return shape[dim] % math.prod(cuts) == 0


def _must_gather(axis: int, dim: int, source: Placements, target: Placements) -> bool:
    """True unless this axis, and every earlier one that concerns `dim`, keeps its placement."""
    return any(
        source[earlier] != target[earlier] and dim in (source[earlier].cut_dim, target[earlier].cut_dim)
        for earlier in range(axis + 1)
    )


def _exchange(axis: int, source: Placements, target: Placements) -> AllToAll | None:
    """One all-to-all instead of a gather and a cut, if no other axis concerns either dim."""
    old, new = source[axis], target[axis]
    if not isinstance(old, Shard) or not isinstance(new, Shard) or old == new:
        return None
    others = [
        placement.cut_dim
        for placements in (source, target)
        for index, placement in enumerate(placements)
        if index != axis
    ]
    return None if old.dim in others or new.dim in others else AllToAll((axis,), old.dim, new.dim)
