"""Who keeps whose copies, and what is whole: any one node may be lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.checkpoint.memory.replica_placement import (
    CompleteSave,
    Holding,
    ReplicaName,
    complete_saves,
    nodes_of,
    replica_rank_of,
)
from disttrain.errors import CheckpointError

WORLDS = st.lists(st.integers(1, 9), min_size=1, max_size=8)
"""How many ranks each node has."""


def nodes_with(num_ranks: list[int]) -> list[range]:
    nodes = nodes_of([num for num in num_ranks for _ in range(num)])
    assert [len(node) for node in nodes] == num_ranks
    return nodes


@given(WORLDS)
def test_copies_lie_on_the_next_node_evenly(num_ranks: list[int]) -> None:
    nodes = nodes_with(num_ranks)
    for node, following in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        replica_ranks = [replica_rank_of(rank, nodes) for rank in node]
        if len(nodes) == 1:
            assert replica_ranks == [None] * len(node)
        else:
            counts = [replica_ranks.count(rank) for rank in following]
            assert sum(counts) == len(node)
            assert max(counts) == math.ceil(len(node) / len(following))


def test_the_last_node_may_have_fewer_than_it_says() -> None:
    assert nodes_of([2, 2, 2]) == [range(2), range(2, 3)]
    assert nodes_of([8, 8]) == [range(2)]


def test_ranks_of_one_node_must_say_the_same() -> None:
    with pytest.raises(CheckpointError, match="rank 2 counts 2 ranks on its node, rank 3 on the same one 1"):
        nodes_of([2, 2, 2, 1])


@given(WORLDS, st.data())
def test_a_save_is_whole_without_any_one_node(num_ranks: list[int], data: st.DataObject) -> None:
    nodes = nodes_with(num_ranks)
    size = nodes[-1].stop
    files = {"manifest.json": 7, **{f"rank-{rank}": 100 + rank for rank in range(size)}}
    on_node: list[dict[str, int]] = [{} for _ in nodes]
    for rank in range(size):
        for place in (rank, replica_rank_of(rank, nodes)):
            has = next((has for node, has in zip(nodes, on_node, strict=True) if place in node), {})
            has[f"rank-{rank}"] = 100 + rank
            if rank == 0:
                has["manifest.json"] = 7
    lost = data.draw(st.integers(0, len(nodes) - 1)) if len(nodes) > 1 else None
    name = ReplicaName(5, 1, "a")
    found = {
        node.start: [Holding(name, has, files if "manifest.json" in has else None)]
        for number, (node, has) in enumerate(zip(nodes, on_node, strict=True))
        if number != lost
    }
    (whole,) = complete_saves(found)
    assert whole.name == name
    assert all(whole.holders[name] for name in files)


NEEDED = {"manifest.json": 1, "x": 10, "y": 20}


def test_the_newest_comes_first_and_what_lacks_a_file_not_at_all() -> None:
    a, b, c, d, e = (ReplicaName(*row) for row in ((1, 1, "a"), (2, 2, "b"), (3, 3, "c"), (4, 4, "d"), (3, 5, "e")))
    found = {
        0: [
            Holding(a, {"manifest.json": 1, "x": 10}, NEEDED),
            Holding(b, NEEDED, NEEDED),
            Holding(c, {"manifest.json": 1, "x": 10}, NEEDED),
            Holding(d, {"x": 10, "y": 20}, None),
        ],
        2: [
            Holding(a, {"x": 10, "y": 20}, None),
            Holding(c, {"y": 19}, None),  # torn
            Holding(e, {"y": 20}, None),  # another save of the same step
        ],
    }
    assert complete_saves(found) == [
        CompleteSave(b, {"manifest.json": [0], "x": [0], "y": [0]}),
        CompleteSave(a, {"manifest.json": [0], "x": [0, 2], "y": [2]}),
    ]


def test_what_was_made_before_training_went_back_is_not_newer() -> None:
    """Steps 10, 20 and 30 are saved; training goes back to 10, and saves 20 again."""
    rows = [(10, 1, "f"), (20, 2, "e"), (30, 3, "d"), (20, 4, "c")]
    found = {0: [Holding(ReplicaName(*row), NEEDED, NEEDED) for row in rows]}
    assert [save.name for save in complete_saves(found)] == [ReplicaName(20, 4, "c"), ReplicaName(10, 1, "f")]


def test_a_copy_less_leaves_the_others() -> None:
    save = CompleteSave(ReplicaName(1, 1, "a"), {"x": [0, 2], "y": [2]})
    assert save.without([["x", 0]]) == CompleteSave(save.name, {"x": [2], "y": [2]})
    assert save.without([["x", 0], ["y", 2]]) is None
