"""Rank arithmetic of meshes: which ranks stand in which row. Pure: no process group, no tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cached_property

from disttrain.errors import MeshError
from disttrain.ranks import Loop, Ranks, cut_loops


class MeshLayout:
    """Ranks arranged in a grid: `ranks` in row-major order of `shape`, one name per axis or none at all. Immutable.

    `members` are the ranks by their rule, which all here goes by; `ranks` lists them, once it is asked for.
    """

    def __init__(self, ranks: Iterable[int], shape: tuple[int, ...], axis_names: tuple[str, ...] | None = None) -> None:
        self.members = Ranks.of(ranks)
        self.shape = shape
        self.axis_names = axis_names
        if not shape or any(size < 1 for size in shape) or math.prod(shape) != len(self.members):
            raise MeshError(
                "mesh",
                f"{len(self.members)} ranks don't fill shape {shape}.",
                "Give positive sizes that multiply to it.",
            )
        if self.members.repeats:
            raise MeshError("mesh", f"ranks {list(self.members)} repeat.", "Place each rank once.")
        if axis_names is not None and (len(axis_names) != len(shape) or len(set(axis_names)) != len(axis_names)):
            raise MeshError(
                "mesh", f"axis names {axis_names} don't fit shape {shape}.", "Give each axis one name of its own."
            )
        self._hash = hash((self.members, shape, axis_names))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshLayout):
            return NotImplemented
        return (self.members, self.shape, self.axis_names) == (other.members, other.shape, other.axis_names)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"MeshLayout({self.members!r}, {self.shape}, {self.axis_names})"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in row-major order."""
        return self.members.listed

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    @cached_property
    def _loops(self) -> list[list[Loop]] | None:
        """The loops of each axis; None where the ranks have no rule that goes by axes."""
        return None if self.members.loops is None else cut_loops(self.members.loops, self.shape)

    @cached_property
    def _slices(self) -> dict[tuple[int, tuple[int, ...]], MeshLayout]:
        return {}

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of `rank`, or None when it is not on the mesh."""
        index = self.members.position(rank)
        if index is None:
            return None
        return tuple(index // stride % size for stride, size in zip(self._strides, self.shape, strict=True))

    def along(self, rank: int, axes: Sequence[int]) -> MeshLayout:
        """The sub-mesh through `rank` that spans the given axes, in that order."""
        key = rank, (*axes,)
        slice_ = self._slices.get(key)
        if slice_ is None:
            slice_ = self._slices[key] = self._along(rank, key[1])
        return slice_

    def _along(self, rank: int, axes: tuple[int, ...]) -> MeshLayout:
        coordinate = self.coordinate(rank)
        if coordinate is None:
            raise MeshError("mesh", f"rank {rank} is not on it.", "Ask on ranks of the mesh only.", rank=rank)
        names = None if self.axis_names is None else tuple(self.axis_names[axis] for axis in axes)
        first = sum(
            position * stride
            for axis, (position, stride) in enumerate(zip(coordinate, self._strides, strict=True))
            if axis not in axes
        )
        if self._loops is not None:
            loops = itertools.chain.from_iterable(self._loops[axis] for axis in axes)
            members = Ranks.grid(self.members[first], loops)
        else:
            members = self.members.at(Ranks.grid(first, [(self.shape[axis], self._strides[axis]) for axis in axes]))
        return MeshLayout(members, tuple(self.shape[axis] for axis in axes), names)

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
            self.members,
            (*self.shape[:axis], *sizes, *self.shape[axis + 1 :]),
            (*axis_names[:axis], *names, *axis_names[axis + 1 :]),
        )

    def joined(self, other: MeshLayout, rank: int, order: Ranks) -> MeshLayout | None:
        """The mesh through `rank` of this one's axes and then `other`'s; None where there is no such grid.

        `order` are the job's ranks in the order in which both count in steps, as slices and cuts of one grid do.
        """
        loops, others = self._loops_in(order, rank), other._loops_in(order, rank)
        if loops is None or others is None or self.axis_names is None or other.axis_names is None:
            return None
        firsts = [order.position(layout.members[0]) for layout in (self, other)]
        first = sum(position for position in firsts if position is not None) - (order.position(rank) or 0)
        places = Ranks.grid(first, [*loops, *others])
        names = (*self.axis_names, *other.axis_names)
        is_grid = not places.repeats and 0 <= places.lowest <= places.highest < len(order)
        if not is_grid or len(set(names)) != len(names):
            return None
        return MeshLayout(order.at(places), (*self.shape, *other.shape), names)

    def _loops_in(self, order: Ranks, rank: int) -> list[Loop] | None:
        """The loops over places in `order` that the axes go through; None where these have no rule, or without `rank`.

        An axis that others were made has several.
        """
        places = order.positions(self.members) if rank in self.members else None
        loops = None if places is None or places.loops is None else cut_loops(places.loops, self.shape)
        return None if loops is None else [*itertools.chain.from_iterable(loops)]

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
