"""Who keeps whose copies, and what is whole: any one node may be lost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from disttrain.checkpoint.keepers import Holding, WholeSave, keeper_of, whole_saves

WORLDS = st.tuples(st.integers(1, 40), st.integers(1, 9))


@given(WORLDS)
def test_copies_lie_on_another_node_evenly(world: tuple[int, int]) -> None:
    size, ranks_per_node = world
    keepers = [keeper_of(rank, size, ranks_per_node) for rank in range(size)]
    if size <= ranks_per_node:
        assert keepers == [None] * size
        return
    for rank, keeper in enumerate(keepers):
        assert keeper is not None
        assert 0 <= keeper < size
        assert keeper // ranks_per_node != rank // ranks_per_node
    # Only a last node with fewer ranks has to keep more than one copy per rank.
    smallest = size % ranks_per_node or ranks_per_node
    assert max(keepers.count(rank) for rank in range(size)) <= math.ceil(ranks_per_node / smallest)


@given(WORLDS, st.data())
def test_a_save_is_whole_without_any_one_node(world: tuple[int, int], data: st.DataObject) -> None:
    size, ranks_per_node = world
    num_nodes = -(-size // ranks_per_node)
    files = {"manifest.json": 7, **{f"rank-{rank}": 100 + rank for rank in range(size)}}
    on_node: dict[int, dict[str, int]] = {node: {} for node in range(num_nodes)}
    for rank in range(size):
        for place in (rank, keeper_of(rank, size, ranks_per_node)):
            if place is not None:
                on_node[place // ranks_per_node][f"rank-{rank}"] = 100 + rank
                if rank == 0:
                    on_node[place // ranks_per_node]["manifest.json"] = 7
    lost = data.draw(st.integers(0, num_nodes - 1)) if num_nodes > 1 else None
    found = {
        node * ranks_per_node: [Holding(5, "a", has, files if "manifest.json" in has else None)]
        for node, has in on_node.items()
        if node != lost
    }
    (whole,) = whole_saves(found)
    assert (whole.step, whole.save_id) == (5, "a")
    assert all(whole.holders[name] for name in files)


def test_the_newest_comes_first_and_what_lacks_a_file_not_at_all() -> None:
    needed = {"manifest.json": 1, "x": 10, "y": 20}
    found = {
        0: [
            Holding(1, "a", {"manifest.json": 1, "x": 10}, needed),
            Holding(2, "b", needed, needed),
            Holding(3, "c", {"manifest.json": 1, "x": 10}, needed),
            Holding(4, "d", {"x": 10, "y": 20}, None),
        ],
        2: [
            Holding(1, "a", {"x": 10, "y": 20}, None),
            Holding(3, "c", {"y": 19}, None),  # torn
            Holding(3, "e", {"y": 20}, None),  # another save of the same step
        ],
    }
    assert whole_saves(found) == [
        WholeSave(2, "b", {"manifest.json": [0], "x": [0], "y": [0]}),
        WholeSave(1, "a", {"manifest.json": [0], "x": [0, 2], "y": [2]}),
    ]
