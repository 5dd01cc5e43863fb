"""visualize_sharding: which ranks hold which part of a tensor, as a table of text."""

from __future__ import annotations

import itertools

from disttrain.dtensor.dtensor import DTensor
from disttrain.dtensor.spec.placement import StridedShard
from disttrain.dtensor.spec.shard_sizes import local_shape_and_offset
from disttrain.errors import LayoutError


def visualize_sharding(dtensor: DTensor, header: str = "") -> str:
    """Print, and return, a table of a tensor of one or two dims: rows and columns are ranges, cells the ranks.

    Needs no communication: any rank may call it. Raises LayoutError for other tensors and for strided cuts.
    """
    spec = dtensor._spec
    if spec.ndim not in (1, 2) or any(isinstance(placement, StridedShard) for placement in spec.placements):
        raise LayoutError(
            "visualize_sharding",
            f"a tensor of {spec.ndim} dims that lies as {spec.layout} has no such picture.",
            "Take one of one or two dims, cut in consecutive pieces.",
            rank=spec.mesh.get_rank(),
        )
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    coordinates = itertools.product(*map(range, spec.mesh.shape))
    for rank, coordinate in zip(spec.mesh.layout.ranks, coordinates, strict=True):
        shape, offset = local_shape_and_offset(spec.shape, spec.mesh.shape, coordinate, spec.placements)
        ranges = tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
        if all(start < end for start, end in ranges):
            holders.setdefault(ranges if spec.ndim == 2 else ((0, 1), *ranges), []).append(rank)
    rows = sorted({row for row, _ in holders})
    columns = sorted({column for _, column in holders})
    lines = [["" if spec.ndim == 1 else f"{spec.shape[0]} x {spec.shape[1]}", *map(_shown, columns)]]
    for row in rows:
        cells = [", ".join(map(str, holders.get((row, column), []))) for column in columns]
        lines.append(["ranks" if spec.ndim == 1 else _shown(row), *cells])
    text = "\n".join([*([header] if header else []), f"{spec.layout}", *_aligned(lines)])
    print(text)  # noqa: T201  # what it is for
    return text


def _shown(extent: tuple[int, int]) -> str:
    return f"{extent[0]}:{extent[1]}"


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
