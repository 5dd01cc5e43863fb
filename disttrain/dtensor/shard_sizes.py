"""Which part of a tensor a rank holds. Pure arithmetic over sizes, mesh shapes and coordinates.

Where several axes shard one dim, they cut in the order of the axes: the first axis cuts the whole, the next one cuts
the piece. Each cut is `torch.chunk`'s: pieces of ceil(size / num_pieces), the last ones shorter or empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.dtensor.placement import Placement, Shard


def piece(size: int, num_pieces: int, position: int) -> tuple[int, int]:
    """(size, offset) of the piece at `position` when `size` elements are cut into `num_pieces`."""
    step = piece_size(size, num_pieces)
    offset = min(position * step, size)
    return min(step, size - offset), offset


def piece_size(size: int, num_pieces: int) -> int:
    """The size of the first, largest piece."""
    return -(-size // num_pieces)


def local_shape_and_offset(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the part at `coordinate`, and where it begins in the whole."""
    sizes, offsets = list(shape), [0] * len(shape)
    for num_pieces, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            size, offset = piece(sizes[placement.dim], num_pieces, position)
            sizes[placement.dim] = size
            offsets[placement.dim] += offset
    return tuple(sizes), tuple(offsets)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch computes them: an empty dim counts as one."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
