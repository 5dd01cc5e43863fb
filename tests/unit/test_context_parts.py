"""Cuts of positions, and who sees whose keys: each position once, equal work, nothing seen left out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.kernels import Causal, Documents, Prefix, SlidingWindow
from disttrain.kernels.attention.context.parts import Parts, by_document, by_window, contiguous, mirrored
from disttrain.kernels.attention.context.planning.cut import plan_cut
from disttrain.kernels.attention.context.planning.tiles import Tiles, tiles_of
from disttrain.kernels.attention.rules import Rule, ScoreIndices, seen


def check_is_a_cut(parts: Parts) -> None:
    positions = [parts.positions(rank) for rank in range(parts.num_ranks)]
    assert torch.cat(positions).sort().values.tolist() == [*range(parts.length)]
    for rank, own in enumerate(positions):
        assert own.tolist() == sorted(own.tolist())
        assert [parts.local_index(rank, position) for position in own.tolist()] == [*range(parts.size(rank))]
        assert all(parts.ranges[rank])
    whole = torch.randn(2, parts.length, 3)
    taken = [parts.take(whole, rank, 1) for rank in range(parts.num_ranks)]
    assert torch.equal(parts.join(taken, 1), whole)


@given(st.integers(0, 70), st.integers(1, 5))
def test_each_position_is_on_one_rank(length: int, num_ranks: int) -> None:
    for cut in (contiguous, mirrored):
        parts = cut(length, num_ranks)
        check_is_a_cut(parts)
        assert max(parts.sizes) - min(parts.sizes) <= (1 if cut is contiguous else 2)


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 5))
def test_documents_are_cut_each_for_itself(lengths: list[int], num_ranks: int) -> None:
    cuts = [by_document(lengths, num_ranks)]
    cuts += [by_window(lengths, num_ranks, size, is_causal=size % 2 == 0) for size in (1, 2, 7, 18, 40)]
    for parts in cuts:
        check_is_a_cut(parts)
        assert parts.length == sum(lengths)
        assert max(parts.sizes) - min(parts.sizes) <= 2


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("size", [2048, 8192, 16384, 25000, 40000])
@pytest.mark.parametrize("is_causal", [True, False])
def test_work_is_equal_under_wide_windows(num_ranks: int, size: int, is_causal: bool) -> None:
    rule = Causal() & SlidingWindow(size) if is_causal else SlidingWindow(size)
    assert plan_cut(rule, 32768, num_ranks).imbalance <= 0.02


@st.composite
def rules(draw: st.DrawFn, batch_size: int, length: int) -> Rule:
    ids = torch.tensor(
        [
            sorted(draw(st.lists(st.integers(0, 3), min_size=length, max_size=length)))
            for _ in range(draw(st.sampled_from([1, batch_size])))
        ]
    )
    every: list[Rule] = [
        Causal(),
        SlidingWindow(draw(st.integers(1, 300))),
        Documents(ids[0] if len(ids) == 1 else ids),
        Prefix(torch.tensor(draw(st.lists(st.integers(0, length), min_size=batch_size, max_size=batch_size)))),
    ]
    chosen = draw(st.lists(st.sampled_from(every), min_size=1, max_size=3))
    rule = chosen[0]
    for part in chosen[1:]:
        rule = rule & part
    return rule


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_tiles_hold_all_that_is_seen(data: st.DataObject) -> None:
    batch_size, length, num_ranks = 2, data.draw(st.integers(1, 400)), data.draw(st.integers(1, 4))
    rule = data.draw(rules(batch_size, length))
    cut = data.draw(st.sampled_from([contiguous, mirrored]))
    tiles = Tiles(cut(length, num_ranks), rule)
    batch = torch.arange(batch_size).view(-1, 1, 1)
    everywhere = torch.arange(length)
    indices = ScoreIndices(batch, torch.zeros(1, 1, 1), everywhere.view(-1, 1), everywhere.view(1, -1))
    sees = seen(rule, indices)
    assert sees is not None
    sees = sees.expand(batch_size, length, length)
    covered = torch.zeros(length, length, dtype=torch.int32)
    for rank in range(num_ranks):
        for source in range(num_ranks):
            for tile in tiles.of(rank, source):
                part = slice(tile.queries.start, tile.queries.stop), slice(tile.keys.start, tile.keys.stop)
                covered[part] += 1
                assert bool(sees[:, part[0], part[1]].all()) or not tile.sees_all
    assert covered.max() <= 1
    assert not (sees.any(0) & (covered == 0)).any()


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16])
def test_work_is_equal_where_each_sees_those_before(num_ranks: int) -> None:
    length = 131_072 if num_ranks != 3 else 100_003
    assert tiles_of(mirrored(length, num_ranks), Causal()).imbalance <= 0.02
    assert tiles_of(contiguous(length, num_ranks), Causal()).imbalance > 0.2
    assert tiles_of(contiguous(length, num_ranks), None).imbalance <= 0.02


def test_nothing_is_needed_from_beyond_a_window() -> None:
    tiles = tiles_of(contiguous(4096, 4), Causal() & SlidingWindow(256))
    assert tiles.needed(2, 0) == ()
    assert tiles.needed(2, 1) == (range(1792, 2048),)
    assert tiles.needed(1, 2) == ()
    mirrored_tiles = tiles_of(mirrored(4096, 4), Causal())
    assert mirrored_tiles.num_needed(3, 0) == 512
    assert mirrored_tiles.num_needed(0, 3) == 1024
