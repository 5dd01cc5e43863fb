"""Checkpoint plans: every element is written once, every wanted element is read once, bytes are balanced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.manifest import Chunk, Manifest, SavedTensor
from disttrain.checkpoint.layout import TensorSpec, parts_at
from disttrain.checkpoint.outline import Outline, with_one_way
from disttrain.checkpoint.plan import SPLIT_BYTES, RankPlan, plan_load, plan_save
from disttrain.dtensor import Placement, Replicate, Shard, StridedShard
from disttrain.errors import CheckpointCorruptError, CheckpointError

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box with at least one element."""
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)]
    return Box(tuple(starts), tuple(sizes))


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...], world_size: int) -> TensorSpec:
    """Plain, or any cuts on any mesh of all ranks in any order."""
    factors = [
        mesh
        for num_axes in (1, 2)
        for mesh in itertools.product(range(1, world_size + 1), repeat=num_axes)
        if math.prod(mesh) == world_size
    ]
    mesh_shape = draw(st.sampled_from(factors))
    if draw(st.booleans()):
        return TensorSpec(shape, "int16")
    dims = [None, *range(len(shape))]
    cuts = tuple(draw(st.sampled_from(dims)) for _ in mesh_shape)
    blocks = tuple(1 if dim is None else draw(st.sampled_from(divisors(shape[dim]))) for dim in cuts)
    if len(set(cuts)) < len(cuts):
        # What a cut leaves of a dim must be as many equal blocks.
        blocks = (1,) * len(cuts)
    return TensorSpec(shape, "int16", tuple(draw(st.permutations(range(world_size)))), mesh_shape, cuts, blocks)


def divisors(size: int) -> list[int]:
    return [number for number in range(1, size + 1) if size % number == 0] or [1]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, dict[str, TensorSpec]]:
    world_size = draw(st.integers(1, 6))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    return world_size, {f"t{place}": draw(shardings(shape, world_size)) for place, shape in enumerate(shapes)}


def count(plans: Sequence[RankPlan], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """How often each element of a tensor is written."""
    times = np.zeros(shape, int)
    for plan in plans:
        for other, box in plan.parts:
            if other == name:
                times[box.slices()] += 1
    return times


@settings(max_examples=30)
@given(worlds())
def test_every_element_is_written_exactly_once(world: tuple[int, dict[str, TensorSpec]]) -> None:
    world_size, tensors = world
    plans = plan_save([Outline(tensors)] * world_size)
    for name, sharding in tensors.items():
        assert (count(plans, name, sharding.shape) == 1).all()


@settings(max_examples=30)
@given(worlds())
def test_ranks_write_only_what_they_hold(world: tuple[int, dict[str, TensorSpec]]) -> None:
    world_size, tensors = world
    for rank, plan in enumerate(plan_save([Outline(tensors)] * world_size)):
        for name, box in plan.parts:
            sharding = tensors[name]
            if not sharding.is_plain:
                held = [whole for whole, holders in sharding.boxes().items() if rank in holders]
                assert any(box.intersection(whole) == box for whole in held)


@settings(max_examples=30)
@given(worlds(), st.data())
def test_a_load_covers_every_wanted_element_once(world: tuple[int, dict[str, TensorSpec]], data: st.DataObject) -> None:
    world_size, tensors = world
    manifest = manifest_of(plan_save([Outline(tensors)] * world_size), tensors)
    wanted = {
        name: data.draw(boxes_in(sharding.shape)) for name, sharding in tensors.items() if 0 not in sharding.shape
    }
    times = {name: np.zeros(tensors[name].shape, int) for name in wanted}
    for read in plan_load(manifest, {name: [box] for name, box in wanted.items()}):
        assert read.wanted == wanted[read.name]
        assert read.box.intersection(read.chunk.box) == read.box
        times[read.name][read.box.slices()] += 1
    for name, box in wanted.items():
        assert (times[name][box.slices()] == 1).all()
        assert times[name].sum() == box.num_elements


PLACEMENTS = [
    [Shard(0), Replicate()],
    [Shard(1), Shard(1)],
    [StridedShard(0, 2), Shard(0)],
    [StridedShard(0, 3), Shard(1)],
    [Shard(1), StridedShard(0, 3)],
    [StridedShard(0, 3), StridedShard(0, 3)],
    [StridedShard(1, 5), StridedShard(0, 4)],
    [StridedShard(0, 6), Shard(0)],
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2), (2, 3), (1, 2)])
def test_parts_are_what_a_rank_holds(placements: list[Placement], mesh_shape: tuple[int, ...]) -> None:
    whole = np.arange(12 * 5).reshape(12, 5)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        local = whole
        for axis_size, place, placement in zip(mesh_shape, coordinate, placements, strict=True):
            if placement.cut_dim is not None:
                local = own_piece(local, placement, axis_size, place)
        found = np.full(local.shape, -1)
        parts = parts_at((12, 5), mesh_shape, coordinate, placements)
        for part in parts:
            found[part.local_slices()] = whole[part.box.slices()]
        assert (found == local).all()
        if placements == [StridedShard(0, 2), Shard(0)] and mesh_shape[1] == 2:
            assert len(parts) == 1


def own_piece(whole: np.ndarray, placement: Placement, axis_size: int, place: int) -> np.ndarray:
    dim, blocks = placement.cut_dim, placement.num_blocks if isinstance(placement, StridedShard) else 1
    step = -(-whole.shape[dim] // blocks // axis_size)
    pieces = [
        np.split(block, [step * at for at in range(1, axis_size)], dim)[place] for block in np.split(whole, blocks, dim)
    ]
    return np.concatenate(pieces, dim)


def manifest_of(plans: Sequence[RankPlan], tensors: dict[str, TensorSpec]) -> Manifest:
    chunks = [
        (name, Chunk(f"rank-{rank}", 0, 2 * box.num_elements, box, b""))
        for rank, plan in enumerate(plans)
        for name, box in plan.parts
    ]
    saved = {
        name: SavedTensor(sharding.shape, sharding.dtype, tuple(chunk for other, chunk in chunks if other == name))
        for name, sharding in tensors.items()
    }
    return Manifest("id", len(plans), "a test", {}, saved, {}, {})


def test_a_gap_between_chunks_is_found() -> None:
    whole = SavedTensor((4,), "int16", (Chunk("rank-0", 0, 6, Box((0,), (3,)), b""),))
    manifest = Manifest("id", 1, "a test", {}, {"w": whole}, {}, {})
    with pytest.raises(CheckpointCorruptError, match="'w' has chunks for 3 of the 4 elements"):
        plan_load(manifest, {"w": [Box.whole((4,))]})


def test_replicated_tensors_are_spread_by_bytes() -> None:
    tensors = {f"t{place}": TensorSpec((place + 1, 10), "float32") for place in range(20)}
    plans = plan_save([Outline(tensors)] * 4)
    loads = [sum(box.num_elements for _, box in plan.parts) for plan in plans]
    assert sum(loads) == 2100
    assert max(loads) <= 1.03 * 2100 / 4


def test_a_large_replicated_tensor_is_split_among_its_holders() -> None:
    tensors = {"w": TensorSpec((3 * SPLIT_BYTES,), "uint8")}
    plans = plan_save([Outline(tensors)] * 3)
    assert [[box for _, box in plan.parts] for plan in plans] == [
        [Box((SPLIT_BYTES * rank,), (SPLIT_BYTES,))] for rank in range(3)
    ]


def test_replicas_take_turns_on_a_mesh_of_two_axes() -> None:
    """Four ranks, two replicas of two halves: each half goes to the holder who has less so far."""
    tensors = {name: TensorSpec((4, 2), "float32", (0, 1, 2, 3), (2, 2), (None, 0)) for name in ("a", "b")}
    plans = plan_save([Outline(tensors)] * 4)
    assert [plan.parts for plan in plans] == [
        [("a", Box((0, 0), (2, 2)))],
        [("a", Box((2, 0), (2, 2)))],
        [("b", Box((0, 0), (2, 2)))],
        [("b", Box((2, 0), (2, 2)))],
    ]


def test_ranks_may_have_different_parts_of_a_model() -> None:
    first = Outline({"a": TensorSpec((4,), "int16"), "both": TensorSpec((2,), "int16")}, ["step"], ["rng"])
    second = Outline({"b": TensorSpec((3,), "int16"), "both": TensorSpec((2,), "int16")}, ["step", "late"], ["rng"])
    plans = plan_save([first, second])
    assert [sorted(name for name, _ in plan.parts) for plan in plans] == [["a"], ["b", "both"]]
    assert [plan.values for plan in plans] == [["step", "rng"], ["late", "rng"]]


def test_different_tensors_of_one_name_are_refused() -> None:
    outlines = [Outline({"w": TensorSpec((4,), "int16")}), Outline({"w": TensorSpec((5,), "int16")})]
    with pytest.raises(CheckpointError, match=r"'w' is .* on rank 0, .* on rank 1"):
        plan_save(outlines)


def test_copies_on_meshes_beside_each_other_are_written_once() -> None:
    columns = [TensorSpec((5, 2), "int16", ranks, (2,), (0,)) for ranks in ((0, 2), (1, 3))]
    plans = plan_save([Outline({"norm": columns[rank % 2], "bias": columns[rank % 2]}) for rank in range(4)])
    for name in ("norm", "bias"):
        assert (count(plans, name, (5, 2)) == 1).all()
    assert all(len(plan.parts) == 1 for plan in plans)
    for other in (TensorSpec((5, 2), "int16", (1, 3), (2,), (1,)), TensorSpec((5, 2), "int16", (0, 3), (2,), (0,))):
        with pytest.raises(CheckpointError, match="Give tensors that differ between ranks names of their own"):
            plan_save([Outline({"norm": columns[0]}), Outline({"norm": other}), Outline({"norm": columns[0]})])


def test_a_tensor_is_on_all_ranks_of_its_mesh() -> None:
    sharded = Outline({"w": TensorSpec((4,), "int16", (0, 1), (2,), (0,))})
    with pytest.raises(CheckpointError, match=r"'w' lies on ranks \[1\] too, whose states lack it"):
        plan_save([sharded, Outline()])


def test_a_name_is_a_tensor_everywhere_or_nowhere() -> None:
    with pytest.raises(CheckpointError, match="'w' is a tensor, a value or a PerRank"):
        plan_save([Outline({"w": TensorSpec((4,), "int16")}), Outline({}, ["w"])])


def test_a_second_name_that_only_some_ranks_tie_stands_for_itself() -> None:
    one, other = TensorSpec((4,), "int16"), TensorSpec((3,), "int16")
    outlines = [
        Outline({"a": one, "c": other}, same_as={"x": "a", "y": "a", "z": "c"}),
        Outline({"a": one, "x": one, "c": other}, same_as={"y": "x", "z": "c"}),
    ]
    settled = with_one_way(outlines)
    assert [dict(outline.tensors) for outline in settled] == [{"a": one, "x": one, "y": one, "c": other}] * 2
    assert [dict(outline.same_as) for outline in settled] == [{"z": "c"}] * 2
    assert with_one_way(outlines[:1]) == outlines[:1]
