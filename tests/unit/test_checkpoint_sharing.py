"""Reads shared among ranks: what several want is read once, by one of them, and everybody gets all that it wants."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.checkpoint.format.box import Box, boxes_of_range
from disttrain.checkpoint.format.manifest import Chunk, Manifest, SavedTensor
from disttrain.checkpoint.layout import TensorSpec
from disttrain.checkpoint.loading.sharing import SharedFetch, plan_shared, shared_boxes
from disttrain.checkpoint.outline import Outline
from disttrain.checkpoint.plan import plan_load, plan_save
from tests.unit.test_checkpoint_plan import SHAPES, shardings

BLOCK_BYTES = 8


@st.composite
def reloads(draw: st.DrawFn) -> tuple[Manifest, list[dict[str, TensorSpec]]]:
    """A save by one world, and what each rank of another wants; some ranks may lack some tensors."""
    old_size, new_size = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    shapes = {f"t{place}": shape for place, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=4)))}
    saved = {name: draw(shardings(shape, old_size)) for name, shape in shapes.items()}
    wanted = {name: draw(shardings(shape, new_size)) for name, shape in shapes.items()}
    if draw(st.booleans()):
        return manifest_of(saved, old_size), [wanted] * new_size
    absent = draw(st.sets(st.tuples(st.sampled_from(sorted(wanted)), st.integers(0, new_size - 1)), max_size=4))
    wants = [
        {name: sharding for name, sharding in wanted.items() if (name, rank) not in absent or not sharding.is_plain}
        for rank in range(new_size)
    ]
    return manifest_of(saved, old_size), wants


def manifest_of(tensors: dict[str, TensorSpec], world_size: int) -> Manifest:
    """Each rank's chunks one after the other in its file."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for rank, plan in enumerate(plan_save([Outline(tensors)] * world_size)):
        offset = 0
        for name, box in plan.parts:
            chunks[name].append(Chunk(f"rank-{rank}", offset, 2 * box.num_elements, box, b""))
            offset += 2 * box.num_elements
    saved = {name: SavedTensor(item.shape, item.dtype, tuple(chunks[name])) for name, item in tensors.items()}
    return Manifest("id", world_size, "a test", {}, saved, {}, {}, block_bytes=BLOCK_BYTES)


@settings(max_examples=60)
@given(reloads())
def test_each_rank_gets_all_and_each_shared_byte_is_read_once(
    reload: tuple[Manifest, list[dict[str, TensorSpec]]],
) -> None:
    manifest, wants = reload
    boxes = all_shared(wants)
    plan = plan_shared(manifest, boxes, max_bytes=2 * BLOCK_BYTES)
    for rank in range(len(wants)):
        own = plan_shared(manifest, shared_boxes(wants, rank), max_bytes=2 * BLOCK_BYTES)
        assert own == [shared for shared in plan if rank in shared.holders]
    assert all(len(shared.holders) > 1 and shared.reader in shared.holders for shared in plan)
    for holders, by_name in boxes.items():
        read = Counter(place for shared in plan if shared.holders == holders for place in places_read(shared))
        assert set(read.values()) <= {1}
        assert set(read) >= {place for fetch in plan_load(manifest, by_name) for place in places_wanted(fetch)}
    for rank, wanted in enumerate(wants):
        for name, sharding in wanted.items():
            mine = {box for box, holders in all_boxes(wants, name, sharding).items() if rank in holders}
            shared_with = [
                box for holders, by_name in boxes.items() if rank in holders for box in by_name.get(name, ())
            ]
            assert len(shared_with) == len(set(shared_with))
            assert set(shared_with) <= mine
            alone = {box for box in mine if len(all_boxes(wants, name, sharding)[box]) == 1}
            assert mine - set(shared_with) == alone


def all_shared(wants: list[dict[str, TensorSpec]]) -> dict[tuple[int, ...], dict[str, list[Box]]]:
    """What any ranks share, of which each knows its own; all that share something know the same of it."""
    boxes: dict[tuple[int, ...], dict[str, list[Box]]] = {}
    for rank in range(len(wants)):
        for holders, by_name in shared_boxes(wants, rank).items():
            assert rank in holders
            assert boxes.setdefault(holders, by_name) == by_name
    return boxes


def all_boxes(wants: list[dict[str, TensorSpec]], name: str, sharding: TensorSpec) -> dict[Box, set[int]]:
    """Who wants which box of a tensor, by enumeration."""
    ranks = {rank for rank, wanted in enumerate(wants) if wanted.get(name) == sharding}
    if sharding.is_plain:
        return {} if 0 in sharding.shape else {Box.whole(sharding.shape): ranks}
    return {box: set(holders) & ranks for box, holders in sharding.boxes().items()}


def places_read(shared: SharedFetch) -> list[tuple[str, int]]:
    """Each byte, once for each time that it is read."""
    return [(shared.fetch.file, place) for place in range(shared.fetch.start, shared.fetch.stop)]


def places_wanted(read: object) -> list[tuple[str, int]]:
    """Each byte of a read: file and offset."""
    chunk, box = read.chunk, read.box.seen_from(read.chunk.box.origin)  # type: ignore[attr-defined]
    numbers = np.arange(chunk.box.num_elements).reshape(chunk.box.shape)[box.slices()].ravel()
    return [(chunk.file, chunk.offset + 2 * int(number) + half) for number in numbers for half in (0, 1)]


def test_readers_take_turns_by_bytes() -> None:
    saved = {"w": TensorSpec((1 << 20,), "uint8"), "v": TensorSpec((1 << 19,), "uint8")}
    manifest = manifest_of(saved, 1)
    plan = plan_shared(manifest, shared_boxes([saved] * 4, 0), max_bytes=1 << 16)
    by_reader = Counter()
    for shared in plan:
        by_reader[shared.reader] += shared.fetch.num_bytes
    assert max(by_reader.values()) - min(by_reader.values()) <= 1 << 16


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_a_range_is_as_many_boxes_as_it_takes(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    stop = data.draw(st.integers(start, numbers.size))
    boxes = list(boxes_of_range(shape, start, stop))
    found = [int(number) for box in boxes for number in numbers[box.slices()].ravel()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
