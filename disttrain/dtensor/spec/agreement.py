"""Agreement among the ranks of a mesh: on a whole's shape, by the shapes of parts, and on the values of copies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor.spec.layout import Layout
from disttrain.dtensor.spec.shard_sizes import local_shape
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh
from disttrain.process_group import all_gather_object, broadcast


def from_all_ranks(mesh: DeviceMesh, value: Any) -> list[Any]:
    """Every rank's `value`, in the order of the mesh's ranks. Collective over the mesh."""
    values = [value]
    for axis in reversed(range(mesh.ndim)):
        lists: list[Any] = [None] * mesh.shape[axis]
        all_gather_object(lists, values, group=mesh.get_group(axis))
        values = [item for each in lists for item in each]
    return values


def agreed_shape(local: torch.Tensor, layout: Layout, shape: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of the whole of which each rank has a part `local`: `shape`, or what the parts add up to.

    Raises: LayoutError, on all ranks, where a part is not what its rank would hold, or dtypes or `shape` differ.
    Collective over the mesh.
    """
    mesh = layout.mesh
    brought = [list(local.shape), str(local.dtype), None if shape is None else list(shape)]
    reports = from_all_ranks(mesh, brought)
    coordinates = list(itertools.product(*map(range, mesh.shape)))
    parts = {coordinate: tuple(part) for coordinate, (part, _, _) in zip(coordinates, reports, strict=True)}
    for rank, (part, dtype, shape_given) in zip(mesh.layout.ranks, reports, strict=True):
        first_part, first_dtype, first_given = reports[0]
        if dtype != first_dtype or shape_given != first_given or len(part) != len(first_part):
            raise _disagreement(layout, f"rank {rank} brings {_shown(part, dtype, shape_given)}", _shown(*reports[0]))
    whole = tuple(shape) if shape is not None else _sums(layout, parts)
    for rank, coordinate in zip(mesh.layout.ranks, coordinates, strict=True):
        expected = local_shape(whole, mesh.shape, coordinate, layout.placements)
        if parts[coordinate] != expected:
            raise _disagreement(
                layout, f"rank {rank} brings shape {parts[coordinate]}", f"{expected} as its part of {whole}"
            )
    return whole


def spread_first(local: torch.Tensor, layout: Layout) -> None:
    """Overwrite `local` by the values of the first rank along each axis where it is replicated. Collective."""
    values = local.detach().contiguous()
    for axis, placement in enumerate(layout.placements):
        if placement.is_replicate():
            broadcast(values, group=layout.mesh.get_group(axis), group_src=0)
    if values.data_ptr() != local.data_ptr():
        local.detach().copy_(values)


def _sums(layout: Layout, parts: dict[tuple[int, ...], tuple[int, ...]]) -> tuple[int, ...]:
    """Sizes of the parts, added up along the axes that cut each dim."""
    sizes = []
    for dim in range(len(next(iter(parts.values())))):
        axes = [axis for axis, placement in enumerate(layout.placements) if placement.cut_dim == dim]
        along = [
            coordinate
            for coordinate in parts
            if all(coordinate[axis] == 0 for axis in range(len(coordinate)) if axis not in axes)
        ]
        sizes.append(sum(parts[coordinate][dim] for coordinate in along))
    return tuple(sizes)


def _shown(part: Sequence[int], dtype: str, shape_given: Sequence[int] | None) -> str:
    of_whole = "" if shape_given is None else f" of a whole of shape {tuple(shape_given)}"
    return f"{dtype} of shape {tuple(part)}{of_whole}"


def _disagreement(layout: Layout, actual: str, expected: str) -> LayoutError:
    return LayoutError(
        "from_local",
        f"{actual}, where placements {list(layout.placements)} want {expected}.",
        "Give parts of one whole, cut as torch.chunk cuts.",
        rank=layout.mesh.get_rank(),
        where=str(layout.mesh.layout),
    )
