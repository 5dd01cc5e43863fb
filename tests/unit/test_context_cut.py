"""The cut that is chosen for a rule: equal work first, then few keys sent; its figures are those of the tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.errors import ShapeError
from disttrain.kernels import Causal, Documents, Prefix, SlidingWindow
from disttrain.kernels.attention.context.planning.cut import plan_cut, plan_cuts
from disttrain.kernels.attention.context.planning.tiles import Tiles
from disttrain.kernels.attention.rules import Rule

LENGTH = 8192


def documents(*lengths: int) -> Documents:
    return Documents(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)))


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (None, "contiguous"),
        (Causal(), "mirrored"),
        (SlidingWindow(128), "contiguous"),
        (Causal() & SlidingWindow(128), "contiguous"),
        (Causal() & SlidingWindow(1024), "by_window"),
        (Causal() & SlidingWindow(6000), "by_window"),
        (SlidingWindow(3000), "by_window"),
        (SlidingWindow(6000), "by_window"),
        (Causal() & SlidingWindow(2048) & documents(5000, 3192), "by_window"),
        (Causal() & documents(*[128] * 64), "contiguous"),
        (Causal() & documents(5000, 3192), "by_document"),
        (Causal() & documents(LENGTH), "mirrored"),
        (Causal() & Documents(torch.stack([documents(5000, 3192).ids, documents(3192, 5000).ids])), "by_document"),
    ],
)
def test_equal_work_first_and_then_few_keys(rule: Rule | None, name: str) -> None:
    chosen = plan_cut(rule, LENGTH, 4)
    assert chosen.name == name
    assert chosen.imbalance <= 0.02
    cuts = plan_cuts(rule, LENGTH, 4)
    least = min(max(cut.work) for cut in cuts)
    for cut in cuts:
        if max(cut.work) <= 1.02 * least:
            assert max(cut.num_received) >= max(chosen.num_received)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 700),
    st.integers(1, 4),
    st.sampled_from(["none", "causal", "window", "both sides", "documents", "prefix"]),
    st.integers(0, 5),
)
def test_figures_are_those_of_the_tiles(length: int, num_ranks: int, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4, (2, length), generator=generator).sort().values
    rule = {
        "none": None,
        "causal": Causal(),
        "window": Causal() & SlidingWindow(1 + 50 * seed),
        "both sides": SlidingWindow(1 + 150 * seed) & Documents(ids),
        "documents": Causal() & Documents(ids),
        "prefix": Prefix(torch.tensor([length // 3, length // 2])),
    }[kind]
    for cut in plan_cuts(rule, length, num_ranks):
        tiles = Tiles(cut.parts, rule)
        assert cut.work == pytest.approx(tiles.work)
        for rank, number in enumerate(cut.num_received):
            others = [source for source in range(num_ranks) if source != rank]
            assert number >= sum(tiles.num_needed(rank, source) for source in others) or kind in (
                "documents",
                "both sides",
            )


def test_it_prints_what_each_rank_has_and_does() -> None:
    assert str(plan_cut(Causal(), 1024, 2)).splitlines() == [
        "1024 positions on 2 ranks, mirrored: 0.0 % more work than the mean at most",
        "  rank 0: 0-255, 768-1023; 2.621e+05 pairs, 512 keys of others",
        "  rank 1: 256-767; 2.621e+05 pairs, 256 keys of others",
    ]


def test_a_million_positions_are_planned_without_their_square() -> None:
    cut = plan_cut(Causal() & SlidingWindow(1024), 200_000, 8)
    assert cut.name == "contiguous"
    assert 1024 <= max(cut.num_received) < 1024 + 128


def test_documents_of_another_length_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"Documents has ids of shape \(5,\), the sequence 6 positions"):
        plan_cut(Causal() & documents(2, 3), 6, 2)
    with pytest.raises(ShapeError, match="-1 positions and 2 ranks"):
        plan_cut(None, -1, 2)
