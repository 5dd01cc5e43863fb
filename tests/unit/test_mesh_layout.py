"""Rank arithmetic of meshes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain.errors import MeshError
from disttrain.mesh import MeshLayout

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def whole(shape: tuple[int, ...]) -> MeshLayout:
    return MeshLayout(tuple(range(math.prod(shape))), shape)


@given(shapes)
def test_coordinates_are_row_major(shape: tuple[int, ...]) -> None:
    layout = whole(shape)
    coordinates = list(itertools.product(*map(range, shape)))
    assert [layout.coordinate(rank) for rank in layout.ranks] == coordinates
    assert layout.coordinate(math.prod(shape)) is None


@given(shapes, st.data())
def test_a_submesh_is_what_indexing_the_grid_gives(shape: tuple[int, ...], data: st.DataObject) -> None:
    grid = torch.arange(math.prod(shape)).view(shape)
    rank = data.draw(st.sampled_from(range(math.prod(shape))))
    axes = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True, min_size=1))
    coordinate = whole(shape).coordinate(rank)
    assert coordinate is not None
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    expected = grid.permute(*axes, *kept)[(..., *(coordinate[axis] for axis in kept))]
    submesh = whole(shape).along(rank, axes)
    assert list(submesh.ranks) == expected.flatten().tolist()
    assert submesh.shape == tuple(expected.shape)
    assert rank in submesh.ranks


def test_axes_by_name() -> None:
    layout = MeshLayout(tuple(range(6)), (2, 3), ("dp", "tp"))
    assert (layout.axis("tp"), layout.axis(-1), layout.axis(0)) == (1, 1, 0)
    assert layout.along(4, [1]) == MeshLayout((3, 4, 5), (3,), ("tp",))
    assert str(layout) == "dp=2 tp=3"


@pytest.mark.parametrize(
    ("ranks", "shape", "names", "rule"),
    [
        ((0, 1, 2), (2, 2), None, "don't fill"),
        ((0, 0), (2,), None, "repeat"),
        ((0, 1), (2,), ("dp", "tp"), "don't fit"),
        ((), (0,), None, "don't fill"),
    ],
)
def test_an_impossible_mesh_is_refused(
    ranks: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...] | None, rule: str
) -> None:
    with pytest.raises(MeshError, match=rule):
        MeshLayout(ranks, shape, names)


def test_an_unknown_axis_names_the_near_one() -> None:
    with pytest.raises(MeshError, match=r"no axis 'dpp' on dp=2 tp=1\. Did you mean 'dp'\?"):
        MeshLayout((0, 1), (2, 1), ("dp", "tp")).axis("dpp")
    with pytest.raises(MeshError, match="axis 2 is out of range"):
        whole((2, 2)).axis(2)
