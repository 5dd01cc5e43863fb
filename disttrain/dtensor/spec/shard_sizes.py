"""Shapes and offsets of ranks' parts. Pure arithmetic over sizes, mesh shapes and coordinates.

Where several axes shard one dim, they cut in the order of the axes: the first axis cuts the whole, the next one cuts
the piece. Each cut is `torch.chunk`'s: pieces of ceil(size / num_pieces), the last ones shorter or empty. A strided cut
does that to every block of what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.dtensor.spec.placement import Placement, Shard, StridedShard
from disttrain.pieces import piece


def cut(size: int, placement: Placement, num_pieces: int, position: int) -> int:
    """The number of elements that the rank at `position` keeps of a dim of `size` that `placement` cuts."""
    blocks = num_blocks(placement)
    return blocks * piece(size // blocks, num_pieces, position)[0]


def num_blocks(placement: Placement) -> int:
    """The number of blocks of a dim that a placement cuts, each for itself."""
    return placement.num_blocks if isinstance(placement, StridedShard) else 1


def local_shape(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """The shape of the part at `coordinate`."""
    sizes = list(shape)
    for num_pieces, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if (dim := placement.cut_dim) is not None:
            sizes[dim] = cut(sizes[dim], placement, num_pieces, position)
    return tuple(sizes)


def local_shape_and_offset(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the part at `coordinate`, and where it begins in the whole. No placement may be StridedShard."""
    sizes, offsets = list(shape), [0] * len(shape)
    for num_pieces, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        assert not isinstance(placement, StridedShard), "a strided piece begins at several places"
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
        if size > 1:
            step *= size
    return tuple(strides[::-1])


def strides_in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor of this shape whose dims lie in the order of these strides, without gaps."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (order[dim], -dim)):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def is_permuted(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True for strides of a tensor that is contiguous but for the order of its dims."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def strides_of_whole(
    shape: Sequence[int], expected: Sequence[int], local_shape: Sequence[int], local_strides: Sequence[int]
) -> tuple[int, ...]:
    """Those of a tensor that a graph returns, of which a part lies as said last: as `expected`, unless that cannot be.

    AOTAutograd of torch 2.11 reads them in the place of the sizes, where both are symbols. No elements share memory.
    """
    if tuple(local_shape) == tuple(shape):
        return tuple(local_strides)
    if is_permuted(shape, expected):
        return tuple(expected)
    strides, step = [0] * len(shape), 1
    # Of dims that lie at one stride the part has one element in all but one; these are taken to be further out.
    for dim in sorted(range(len(shape)), key=lambda dim: (local_strides[dim], local_shape[dim] == 1, -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
