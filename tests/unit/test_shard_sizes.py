"""Which part of a tensor a rank holds: as torch.chunk cuts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain.dtensor.spec.placement import Replicate, Shard
from disttrain.dtensor.spec.shard_sizes import contiguous_strides, local_shape_and_offset, strides_of_whole
from disttrain.pieces import piece


@given(st.integers(0, 20), st.integers(1, 6))
def test_pieces_are_chunks(size: int, num_pieces: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_pieces)] if size else []
    chunks += [[]] * (num_pieces - len(chunks))
    for position, chunk in enumerate(chunks):
        length, offset = piece(size, num_pieces, position)
        assert list(range(offset, offset + length)) == chunk


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.data(),
)
def test_the_parts_tile_the_whole(shape: list[int], mesh_shape: list[int], data: st.DataObject) -> None:
    dims = st.sampled_from(range(len(shape)))
    placements = [data.draw(st.just(Replicate()) | dims.map(Shard)) for _ in mesh_shape]
    covered = torch.zeros(shape, dtype=torch.int64)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        sizes, offsets = local_shape_and_offset(shape, mesh_shape, coordinate, placements)
        covered[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))] += 1
    copies = math.prod(
        size for size, placement in zip(mesh_shape, placements, strict=True) if isinstance(placement, Replicate)
    )
    assert torch.equal(covered, torch.full(shape, copies))


@given(st.lists(st.integers(0, 4), max_size=4))
def test_strides_are_those_of_torch(shape: list[int]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@given(st.permutations(range(3)), st.lists(st.integers(2, 5), min_size=3, max_size=3), st.integers(0, 2), st.booleans())
def test_strides_of_a_whole_are_found_where_sizes_were_told(
    order: list[int], half: list[int], dim: int, is_told: bool
) -> None:
    """`order`: the dims from the outermost in memory to the innermost."""

    def strides_of(shape: list[int]) -> tuple[int, ...]:
        return torch.empty([shape[place] for place in order]).permute([order.index(dim) for dim in range(3)]).stride()

    whole = [size * 2 if place == dim else size for place, size in enumerate(half)]
    told = strides_of(whole) if is_told else tuple(whole)
    assert strides_of_whole(whole, told, half, strides_of(half)) == strides_of(whole)
    assert strides_of_whole(whole, told, whole, strides_of(whole)) == strides_of(whole)


@pytest.mark.parametrize("is_outer", [True, False])
def test_a_dim_whose_part_is_one_or_none_is_taken_to_lie_further_out(is_outer: bool) -> None:
    shape, part = ([4, 6], [1, 6]) if is_outer else ([6, 4], [6, 0])
    found = strides_of_whole(shape, shape, part, torch.empty(part).stride())
    assert found == contiguous_strides(shape)
