"""What attention of cut sequences is put together from: pieces, joined results, steps, plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.kernels import Causal, Documents, SlidingWindow
from disttrain.kernels.attention.context.agreement import Agreed
from disttrain.kernels.attention.context.blocks import bands, dense
from disttrain.kernels.attention.context.blocks.dense import Places
from disttrain.kernels.attention.context.blocks.pieces import ALL, CAUSAL, Piece, pieces_of
from disttrain.kernels.attention.context.blocks.placed import block_tables, weighted
from disttrain.kernels.attention.context.parts import Parts, by_document, contiguous, mirrored
from disttrain.kernels.attention.context.planning.heads_cut import num_head_groups
from disttrain.kernels.attention.context.planning.plan import HOSTS, ContextPlan, Shape
from disttrain.kernels.attention.context.planning.steps import GATHER, HEADS, RING, steps_of
from disttrain.kernels.attention.context.planning.tiles import tiles_of
from disttrain.kernels.attention.context.sums.joined import Joined
from disttrain.kernels.attention.context.sums.sums import Sums
from disttrain.kernels.attention.rules import ScoreIndices, seen
from tests.cases.attention import NAMES, rule_called
from tests.cases.kernels import drawn

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LLAMA = Shape(1, 64, 8, 128, 128, 2)


def test_pieces_know_what_kernels_know() -> None:
    """All, causal at the end, bands; what each mask hides of a piece alone counts."""
    rule = Causal() & Documents(torch.arange(512) // 256)
    assert pieces_of(rule, (range(256, 512),), (range(512),)) == (Piece(range(256), range(256, 512), CAUSAL),)
    assert pieces_of(Causal(), (range(256, 512),), (range(512),)) == (
        Piece(range(256), range(256), ALL),
        Piece(range(256), range(256, 512), CAUSAL),
    )
    window = Causal() & SlidingWindow(300)
    assert pieces_of(window, (range(256, 512),), (range(256, 512),)) == (Piece(range(256), range(256), CAUSAL),)
    assert pieces_of(window, (range(256, 512),), (range(128, 256),)) == (
        Piece(range(128), range(128), ALL),
        Piece(range(128, 256), range(128), (43, -1)),
    )
    assert pieces_of(window, (range(512, 640),), (range(128, 256),)) == (Piece(range(128), range(128), None),)
    assert pieces_of(window, (range(640, 768),), (range(128, 256),)) == ()


@pytest.mark.parametrize("name", NAMES)
def test_parts_join_to_the_whole(name: str) -> None:
    """Forward by log-sum-exps; backward of each part from the whole's; those who see nothing have zeros, and no nan."""
    length = 60
    rule = rule_called(name, 2, 4, length)
    query, key, value = (drawn(2, heads, length, 8, seed=heads) for heads in (4, 2, 2))
    positions = torch.arange(length)
    places = Places(rule, positions, positions, 0.3)
    expected, expected_lse = dense.forward(query, key, value, places)
    joined, cuts = Joined(query, 8), (range(40, 60), range(25), range(25, 40))
    for run in cuts:
        part = slice(run.start, run.stop)
        result = dense.forward(query, key[:, :, part], value[:, :, part], places._replace(keys=positions[part]))
        joined.add(range(length), *result)
    out, lse = joined.result()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    grad_out = drawn(2, 4, length, 8, seed=7)
    wanted = dense.backward(grad_out, query, key, value, expected, expected_lse, places)
    total = torch.zeros_like(query)
    for run in cuts:
        part = slice(run.start, run.stop)
        own = (key[:, :, part], value[:, :, part])
        at_part = places._replace(keys=positions[part])
        dquery, dkey, dvalue = dense.backward(grad_out, query, *own, expected, expected_lse, at_part)
        total += dquery
        torch.testing.assert_close(dkey, wanted[1][:, :, part])
        torch.testing.assert_close(dvalue, wanted[2][:, :, part])
        own_out, own_lse = dense.forward(query, *own, at_part)
        assert all(grad.isfinite().all() for grad in weighted(grad_out, expected, expected_lse, own_out, own_lse))
    torch.testing.assert_close(total, wanted[0])


@pytest.mark.parametrize("band", [ALL, CAUSAL])
def test_kernels_of_bands_are_as_dense(band: tuple[int, int]) -> None:
    query, key, value = (drawn(2, heads, 9, 8, seed=heads) for heads in (4, 2, 2))
    rule = Causal() if band == CAUSAL else None
    places = Places(rule, torch.arange(9), torch.arange(9), 0.4)
    kernel = bands.kernel_for(band, query, key, value)
    assert kernel
    expected = dense.forward(query, key, value, places)
    for found, wish in zip(bands.forward(kernel, band, query, key, value, 0.4), expected, strict=True):
        torch.testing.assert_close(found, wish)
    out, lse = (drawn(2, 4, 9, 8, seed=9), expected[1] + 1)
    lse[0, 0, 3] = -torch.inf
    grad_out = drawn(2, 4, 9, 8, seed=8)
    grads = bands.backward(kernel, band, grad_out, query, key, value, out, lse, 0.4)
    finite = lse.clone()
    finite[0, 0, 3] = torch.inf
    for found, wish in zip(grads, dense.backward(grad_out, query, key, value, out, finite, places), strict=True):
        torch.testing.assert_close(found, wish)


def counted_by_flash_attention(piece: Piece) -> torch.Tensor:
    """Which keys it computes for a band (queries, keys): a bound as large as keys are many is none to it, and none
    beside another bound is as many."""
    num_queries, num_keys = len(piece.queries), len(piece.keys)
    assert piece.band is not None
    before, behind = (-1 if bound >= num_keys else bound for bound in piece.band)
    if before < 0 <= behind:
        before = num_keys
    if behind < 0 <= before:
        behind = num_keys
    last_seen = torch.arange(num_queries).unsqueeze(1) + num_keys - num_queries
    keys = torch.arange(num_keys)
    if before < 0:
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    return (keys >= last_seen - before) & (keys <= last_seen + behind)


@given(
    st.sampled_from([None, 1, 2, 7, 30, 200]),
    st.booleans(),
    st.tuples(st.integers(0, 60), st.integers(1, 90)),
    st.tuples(st.integers(0, 60), st.integers(1, 90)),
)
def test_bands_are_counted_as_flash_attention_does(
    size: int | None, is_causal: bool, queries: tuple[int, int], keys: tuple[int, int]
) -> None:
    window = SlidingWindow(size) if size else None
    rule = (window & Causal() if window else Causal()) if is_causal else window
    query_run, key_run = (range(first, first + length) for first, length in (queries, keys))
    counts = torch.zeros(len(query_run), len(key_run), dtype=torch.int64)
    for piece in pieces_of(rule, (query_run,), (key_run,)):
        block = counts[piece.queries.start : piece.queries.stop, piece.keys.start : piece.keys.stop]
        if piece.band is None:
            distance = torch.tensor(query_run)[piece.queries].unsqueeze(1) - torch.tensor(key_run)[piece.keys]
            block += ((distance >= 0) | (not is_causal)) & (distance.abs() < (size or 1000))
        else:
            block += counted_by_flash_attention(piece)
    distance = torch.tensor(query_run).unsqueeze(1) - torch.tensor(key_run)
    expected = ((distance >= 0) | (not is_causal)) & (distance.abs() < (size or 1000))
    assert torch.equal(counts, expected.long())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [mirrored(700, 3), by_document([300, 400], 2)], ids=["mirrored", "by document"])
def test_blocks_of_positions_hold_what_is_seen(parts: Parts, name: str) -> None:
    """Also where a block has runs of positions far from each other."""
    rule = rule_called(name, 2, 4, 700)
    queries, keys = parts.positions(1), parts.positions(0)
    some, every = (table.expand(2, 1, -1, -1) for table in block_tables(rule, queries, keys))
    batch, head = torch.arange(2).view(-1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    sees = seen(rule, ScoreIndices(batch, head, queries.view(-1, 1), keys))
    sees = torch.ones(2, 1, len(queries), len(keys), dtype=torch.bool) if sees is None else sees
    for row, rows in enumerate(sees.expand(2, 1, len(queries), len(keys)).split(128, 2)):
        for column, block in enumerate(rows.split(128, 3)):
            assert (some[:, :, row, column] | ~block.flatten(2).any(2)).all()
            assert (~every[:, :, row, column] | block.flatten(2).all(2)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(2, 5), st.sampled_from(NAMES), st.sampled_from([contiguous, mirrored]))
def test_who_receives_is_sent_it(length: int, num_ranks: int, name: str, cut: Callable[[int, int], Parts]) -> None:
    parts, rule = cut(length, num_ranks), rule_called(name, 2, 4, length)
    plan = ContextPlan(parts, rule, Shape(2, 4, 2, 8, 6, 4))
    for way in (RING, GATHER):
        steps = [steps_of(tiles_of(parts, rule), rank, way) for rank in range(num_ranks)]
        for number in range(len(steps[0])):
            sent = {(rank, to, ranges) for rank in range(num_ranks) for to, ranges in steps[rank][number].sends}
            come = {(of, rank, ranges) for rank in range(num_ranks) for of, ranges in steps[rank][number].receives}
            assert sent == come
        there, back = zip(*(plan.sent_bytes(rank, way) for rank in range(num_ranks)), strict=True)
        assert sum(back) == 2 * sum(there)
    assert [plan.sent_bytes(rank, RING) for rank in range(num_ranks)] == [
        plan.sent_bytes(rank, GATHER) for rank in range(num_ranks)
    ]


def test_what_is_chosen_and_why() -> None:
    long = ContextPlan(mirrored(131_072, 8), Causal(), LLAMA, HOSTS)
    assert long.way == RING
    assert "ring is chosen: ring takes" in str(long)
    assert "keys of 7" in str(long)
    # With nothing to hide under, latencies count; with few heads of keys, results are more than these.
    assert ContextPlan(mirrored(2048, 4), Causal(), Shape(1, 6, 6, 64, 64, 2)).way == GATHER
    assert ContextPlan(mirrored(131_072, 8), Causal(), LLAMA._replace(num_kv_heads=1)).way == GATHER
    # As many heads of keys as of queries are more to be sent than these.
    assert ContextPlan(mirrored(32_768, 8), Causal(), Shape(1, 64, 64, 128, 128, 2)).way == HEADS
    # Beyond a window nothing is sent.
    window = ContextPlan(contiguous(4096, 4), Causal() & SlidingWindow(256), LLAMA)
    assert window.sent_bytes(0, RING)[0] == 256 * 8 * 256 * 2
    assert window.sent_bytes(3, RING)[0] == 0


@pytest.mark.parametrize("length", [32_768, 131_072])
def test_what_is_chosen_is_what_four_gpus_have_measured_best(length: int) -> None:
    """By the figures that the constants are fitted to: the choice, and the differences to 1 and 4 % of the time."""
    record = json.loads((RESULTS / "context_gpu_4.json").read_text())["rows"]
    (sides,) = [row["sides"] for row in record if row["case"] == f"forward and backward, {length:,} positions"]
    measured = {way: sides[name][0] for way, name in ((RING, "ours"), (GATHER, "gather"), (HEADS, "heads"))}
    plan = ContextPlan(mirrored(length, 4), Causal(), Shape(1, 32, 8, 128, 128, 2))
    assert plan.way == min(measured, key=measured.__getitem__)
    estimated = {cost.way: 1e3 * cost.cost_s for cost in plan.costs}
    for way in (GATHER, HEADS):
        difference = (estimated[way] - estimated[RING]) - (measured[way] - measured[RING])
        assert abs(difference) < (0.01 if way == GATHER else 0.04) * measured[RING]


def test_many_documents_are_planned_quickly() -> None:
    """Each rank plans for each new batch."""
    ids = torch.arange(131_072) // 1311
    parts = by_document([1311] * 99 + [131_072 - 99 * 1311], 8)
    tiles = tiles_of(parts, Causal() & Documents(ids))
    assert len(steps_of(tiles, 0, GATHER)[0].pieces) <= 6 * 100
    assert tiles.imbalance < 0.05


@pytest.mark.parametrize(
    ("num_kv_heads", "num_elements", "expected"),
    [(8, 1 << 25, 1), (8, 1 << 26, 2), (8, 1 << 30, 8), (1, 1 << 40, 1), (6, 5 << 25, 3), (3, 2 << 25, 1), (8, 0, 1)],
)
def test_groups_of_heads_divide_them_and_are_large(num_kv_heads: int, num_elements: int, expected: int) -> None:
    assert num_head_groups(num_kv_heads, num_elements) == expected


def test_layers_of_several_rules_are_compared_once() -> None:
    """On GPUs to compare lets the host wait."""
    agreed, compared = Agreed(), []
    for _ in range(3):
        for number in (1, 1, 2, 1, 3):
            compared.append(not agreed.is_known(number))
            agreed.add(number)
    assert compared == [True] * 5 + [True] + [False] * 9
    assert not agreed.is_known(2)


@given(st.integers(0, 40), st.data())
def test_sums_are_zero_where_nothing_comes(length: int, data: st.DataObject) -> None:
    like = torch.zeros(1, 2, length, 3, dtype=torch.bfloat16)
    sums, expected = Sums(like), torch.zeros(1, 2, length, 3)
    for number in range(data.draw(st.integers(0, 6))):
        start = data.draw(st.integers(0, length))
        run = range(start, data.draw(st.integers(start, length)))
        term = drawn(1, 2, len(run), 3, seed=number).to(torch.bfloat16)
        sums.add(run, term)
        expected[:, :, run.start : run.stop] += term
    assert torch.equal(sums.total(), expected)
    assert torch.equal(sums.total(), expected)
