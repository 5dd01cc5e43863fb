"""Rank arithmetic of meshes: which ranks stand in which row. Pure: no process group, no tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from disttrain.errors import MeshError


@dataclass(frozen=True)
class MeshLayout:
    """Ranks arranged in a grid: `ranks` in row-major order of `shape`, one name per axis or none at all."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shape or any(size < 1 for size in self.shape) or math.prod(self.shape) != len(self.ranks):
            raise MeshError(
                "mesh",
                f"{len(self.ranks)} ranks don't fill shape {self.shape}.",
                "Give positive sizes that multiply to it.",
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise MeshError("mesh", f"ranks {list(self.ranks)} repeat.", "Place each rank once.")
        names = self.axis_names
        if names is not None and (len(names) != len(self.shape) or len(set(names)) != len(names)):
            raise MeshError(
                "mesh", f"axis names {names} don't fit shape {self.shape}.", "Give each axis one name of its own."
            )

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of `rank`, or None when it is not on the mesh."""
        index = self._index.get(rank)
        if index is None:
            return None
        return tuple(index // stride % size for stride, size in zip(self._strides, self.shape, strict=True))

    def along(self, rank: int, axes: Sequence[int]) -> MeshLayout:
        """The sub-mesh through `rank` that spans the given axes, in that order."""
        coordinate = self.coordinate(rank)
        if coordinate is None:
            raise MeshError("mesh", f"rank {rank} is not on it.", "Ask on ranks of the mesh only.", rank=rank)
        origin = sum(
            position * stride
            for axis, (position, stride) in enumerate(zip(coordinate, self._strides, strict=True))
            if axis not in axes
        )
        offsets = [0]
        for axis in axes:
            offsets = [offset + step * self._strides[axis] for offset in offsets for step in range(self.shape[axis])]
        names = None if self.axis_names is None else tuple(self.axis_names[axis] for axis in axes)
        return MeshLayout(
            tuple(self.ranks[origin + offset] for offset in offsets), tuple(self.shape[axis] for axis in axes), names
        )

    def unfolded(self, axis: int, sizes: Sequence[int], names: Sequence[str]) -> MeshLayout:
        """One axis cut into several, the last of which goes over neighbours. Raises MeshError where they don't fit."""
        if math.prod(sizes) != self.shape[axis]:
            raise MeshError(
                "mesh",
                f"sizes {tuple(sizes)} don't multiply to axis {axis} of {self}.",
                f"Cut {self.shape[axis]} ranks.",
            )
        if self.axis_names is None and len(self.shape) > 1:
            raise MeshError("mesh", f"the other axes of {self} have no names.", "Name all with mesh_dim_names.")
        axis_names = self.axis_names or ("",)
        return MeshLayout(
            self.ranks,
            (*self.shape[:axis], *sizes, *self.shape[axis + 1 :]),
            (*axis_names[:axis], *names, *axis_names[axis + 1 :]),
        )

    def joined(self, other: MeshLayout, rank: int, order: Sequence[int]) -> MeshLayout | None:
        """The mesh through `rank` of this one's axes and then `other`'s; None where there is no such grid.

        `order` are the job's ranks in the order in which both count in equal steps, as slices and cuts of one grid do.
        """
        position = {rank: index for index, rank in enumerate(order)}
        steps, others = self._steps(position, rank), other._steps(position, rank)
        if steps is None or others is None or self.axis_names is None or other.axis_names is None:
            return None
        ranks = [position[self.ranks[0]] + position[other.ranks[0]] - position[rank]]
        for step, size in zip((*steps, *others), (*self.shape, *other.shape), strict=True):
            ranks = [first + step * index for first in ranks for index in range(size)]
        names = (*self.axis_names, *other.axis_names)
        is_grid = len(set(ranks)) == len(ranks) and 0 <= min(ranks) <= max(ranks) < len(order)
        if not is_grid or len(set(names)) != len(names):
            return None
        return MeshLayout(tuple(order[rank] for rank in ranks), (*self.shape, *other.shape), names)

    def _steps(self, position: dict[int, int], rank: int) -> tuple[int, ...] | None:
        """The distance of neighbours along each axis in `position`; None where that changes, or without `rank`."""
        if rank not in self._index or not set(self.ranks) <= position.keys():
            return None
        positions = [position[rank] for rank in self.ranks]
        steps = tuple(
            positions[stride] - positions[0] if size > 1 else 0
            for stride, size in zip(self._strides, self.shape, strict=True)
        )
        expected = [positions[0]]
        for step, size in zip(steps, self.shape, strict=True):
            expected = [first + step * index for first in expected for index in range(size)]
        return steps if positions == expected else None

    def axis(self, name_or_index: str | int) -> int:
        """The index of an axis, by its name or (maybe negative) index. Raises MeshError when there is none."""
        num_axes = len(self.shape)
        if isinstance(name_or_index, int):
            if -num_axes <= name_or_index < num_axes:
                return name_or_index % num_axes
            raise MeshError("mesh", f"axis {name_or_index} is out of range for {self}.", f"Give 0 to {num_axes - 1}.")
        names = self.axis_names or ()
        if name_or_index in names:
            return names.index(name_or_index)
        near = get_close_matches(name_or_index, names, n=1)
        named = f"Did you mean {near[0]!r}?" if near else f"Give one of {', '.join(names)}, or make the mesh with it."
        remedy = named if names else "Name the axes with mesh_dim_names."
        raise MeshError("mesh", f"there is no axis {name_or_index!r} on {self}.", remedy)

    def __str__(self) -> str:
        if self.axis_names is None:
            return "x".join(map(str, self.shape))
        return " ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))
