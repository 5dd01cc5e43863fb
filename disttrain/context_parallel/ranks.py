"""Lets the ranks of an axis compare what they were given before they communicate about it: all raise, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from disttrain.errors import DisttrainError, MeshError, RankMismatchError
from disttrain.mesh import DeviceMesh
from disttrain.process_group.calls.collectives import all_gather_into_tensor

Result = TypeVar("Result")


def check_axis(operation: str, mesh: object) -> DeviceMesh:
    """The mesh, of one axis. Raises MeshError otherwise."""
    if not isinstance(mesh, DeviceMesh):
        kind = f"{type(mesh).__module__}.{type(mesh).__qualname__}"
        raise MeshError(operation, f"the mesh is a {kind}.", 'Give an axis of a mesh of disttrain\'s: mesh["cp"].')
    if mesh.ndim != 1:
        problem = f"the mesh has {mesh.ndim} axes, {mesh.mesh_dim_names}."
        raise MeshError(operation, problem, 'Give the one that cuts positions: mesh["cp"].', rank=mesh.get_rank())
    return mesh


def alike(
    operation: str, axis: DeviceMesh, names: Sequence[str], find: Callable[[], tuple[Result, list[int]]]
) -> Result:
    """The result of `find`, which gives numbers with it, called `names`, that all ranks of the axis must have alike.

    Where `find` raises on a rank, that rank raises its error, and the others one that names the rank.
    Collective: a few bytes on the host.
    """
    problem: DisttrainError | None = None
    result: Result | None = None
    numbers = [0] * len(names)
    try:
        result, numbers = find()
    except DisttrainError as error:
        problem = error
    num_ranks = axis.size()
    if num_ranks > 1:
        row = torch.tensor([problem is not None, *numbers])
        rows = torch.empty(num_ranks, len(row), dtype=row.dtype)
        all_gather_into_tensor(rows.view(-1), row, axis.get_group())
        if problem is None:
            _compare(operation, axis, names, rows.tolist())
    if problem is not None:
        raise problem
    return result  # type: ignore[return-value]


def _compare(operation: str, axis: DeviceMesh, names: Sequence[str], rows: list[list[int]]) -> None:
    ranks, rank = axis.mesh.flatten().tolist(), axis.get_rank()
    failed = [rank for rank, row in zip(ranks, rows, strict=True) if row[0]]
    if failed:
        problem = f"rank {failed[0]} was given what it cannot take."
        raise RankMismatchError(operation, problem, "Its own error says what.", rank=rank)
    for number, name in enumerate(names, 1):
        values = [row[number] for row in rows]
        if len({*values}) > 1:
            each = ", ".join(f"{value} on rank {other}" for other, value in zip(ranks, values, strict=True))
            problem = f"{name} is {each}."
            raise RankMismatchError(operation, problem, "Give the same on all ranks of the axis.", rank=rank)
