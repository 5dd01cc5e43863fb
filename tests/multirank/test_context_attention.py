"""Attention of sequences cut over ranks, against one process in fp64: every rule, way and cut; bytes; bad input."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.errors import LayoutError, MeshError, ShapeError
from disttrain.kernels import Alibi, Causal, Documents, Prefix, SlidingWindow, SoftCap, attention
from disttrain.kernels.attention.context.current import using
from disttrain.kernels.attention.context.operator import plan_of
from disttrain.kernels.attention.context.parts import Parts, by_document, contiguous, mirrored
from disttrain.kernels.attention.context.planning import heads_cut
from disttrain.kernels.attention.context.planning.heads_cut import heads_divide
from disttrain.kernels.attention.rules import Rule
from disttrain.kernels.attention.runs import dense
from disttrain.kernels.attention.sdpa import attended
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.attention import NAMES, rule_called
from tests.cases.cut_attention import BATCH, axis_of_all, whole
from tests.cases.kernels import drawn

WAYS = ("ring", "gather", "heads")


def assert_as_one_process(
    axis: disttrain.DeviceMesh,
    cuts: list[tuple[Parts, str | None]],
    rule: Rule | None,
    heads: tuple[int, int],
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
) -> None:
    """Values and gradients, for parts of one length and ways."""
    rank = axis.get_local_rank()
    exact = [tensor.to(dtype).double().requires_grad_() for tensor in whole(heads, cuts[0][0].length, dims)]
    expected = dense(*exact, rule, None)
    weight = drawn(*expected.shape, seed=5)
    wanted = torch.autograd.grad(expected, exact, weight)
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5}.get(dtype, 4e-2)
    close = {"rtol": tolerance, "atol": tolerance}
    for parts, way in cuts:
        own = [parts.take(tensor.detach(), rank, 2).to(dtype).requires_grad_() for tensor in exact]
        result = attention(*own, rule, axis=axis, parts=parts, way=way)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), parts.take(expected, rank, 2), **close)
        grads = torch.autograd.grad(result, own, parts.take(weight, rank, 2).to(dtype))
        for grad, wish in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad.double(), parts.take(wish, rank, 2), **close)


def cuts_of(length: int, num_ranks: int) -> list[Parts]:
    lengths = [length // 3, length - length // 3]
    return [contiguous(length, num_ranks), mirrored(length, num_ranks), by_document(lengths, num_ranks)]


@on_ranks(2, 3, 4)
def test_every_rule_in_every_way() -> None:
    axis = axis_of_all()
    num_ranks = axis.size()
    heads = (2 * num_ranks, num_ranks)
    for length in sorted({1, 2, num_ranks - 1, 67, 150}):
        for number, name in enumerate(NAMES):
            cuts = cuts_of(length, num_ranks)
            turns = [(cuts[(number + turn) % len(cuts)], way) for turn, way in enumerate(WAYS)]
            # Every other time in groups of heads, as where a rank's sums in fp32 would take much memory.
            with mock.patch.object(heads_cut, "_GROUP_ELEMENTS", 1 if number % 2 else 1 << 25):
                assert_as_one_process(axis, turns, rule_called(name, BATCH, heads[0], length), heads)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Parts, Rule | None, tuple[int, int], str | None, tuple[int, int]]:
    num_ranks, length = draw(st.integers(2, 4)), draw(st.integers(1, 160))
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 8 // kv_heads))
    ids = torch.tensor(
        [sorted(draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))) for _ in range(BATCH)]
        if length < 40
        else [[place * 4 // length for place in range(length)], [place * 7 // length for place in range(length)]]
    )
    every: list[Rule] = [
        Causal(),
        SlidingWindow(draw(st.integers(1, 200))),
        Documents(ids),
        Documents(ids[0]),
        Prefix(torch.tensor([draw(st.integers(0, length)) for _ in range(BATCH)])),
        SoftCap(1.5),
        Alibi(0.5 ** torch.arange(1.0, heads + 1)),
    ]
    rule: Rule | None = None
    for part in draw(st.lists(st.sampled_from(every), max_size=3, unique_by=type)):
        rule = part if rule is None else rule & part
    bounds = sorted(draw(st.lists(st.integers(0, length), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    ends = [0, *bounds, length]
    uneven = Parts(length, tuple(tuple(filter(None, [range(ends[i], ends[i + 1])])) for i in range(num_ranks)))
    parts = draw(st.sampled_from([*cuts_of(length, num_ranks), uneven]))
    ways = WAYS if heads_divide(heads, kv_heads, num_ranks) else WAYS[:2]
    dims = draw(st.sampled_from([(8, 8), (4, 6), (1, 1)]))
    return num_ranks, parts, rule, (heads, kv_heads), draw(st.sampled_from([None, *ways])), dims


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_rule_heads_and_lengths(case: Any) -> None:
    num_ranks, parts, rule, heads, way, dims = case
    run_threads(num_ranks, lambda: assert_as_one_process(axis_of_all(), [(parts, way)], rule, heads, dims))


@on_ranks(3)
def test_dtypes() -> None:
    axis = axis_of_all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name in ("causal", "all"):
            rule = rule_called(name, BATCH, 6, 50)
            assert_as_one_process(axis, [(mirrored(50, 3), way) for way in WAYS], rule, (6, 3), dtype=dtype)


@on_ranks(1, 2)
def test_parts_need_not_be_told() -> None:
    """Equal parts by the rule; those of the block around; an axis of one rank is the plain call."""
    axis = axis_of_all()
    rank, num_ranks = axis.get_local_rank(), axis.size()
    for rule, cut in ((Causal(), mirrored), (Prefix(torch.tensor([3, 9])), mirrored), (None, contiguous)):
        parts, tensors = cut(8 * num_ranks, num_ranks), whole((4, 2), 8 * num_ranks)
        expected = parts.take(dense(*tensors, rule, None), rank, 2)
        own = [parts.take(tensor, rank, 2) for tensor in tensors]
        torch.testing.assert_close(attention(*own, rule, axis=axis), expected)
    parts, tensors = contiguous(7 * num_ranks + 1, num_ranks), whole((4, 4), 7 * num_ranks + 1)
    own = [parts.take(tensor, rank, 2) for tensor in tensors]
    expected = parts.take(dense(*tensors, Causal(), None), rank, 2)
    with using(parts, axis):
        torch.testing.assert_close(attention(*own, Causal()), expected)
        torch.testing.assert_close(attended(*own, is_causal=True), expected)
        torch._dynamo.reset()
        compiled = torch.compile(lambda *tensors: 2 * attended(*tensors, is_causal=True), backend="aot_eager")
        torch.testing.assert_close(compiled(*own), 2 * expected)
    # And no more after the block.
    assert compiled(*own).shape == own[0].shape
    assert attention(*own).shape == own[0].shape


@on_ranks(2)
def test_modes() -> None:
    """Checkpointed, without gradients, within autocast and a graph, of one tensor twice, of any strides."""
    axis = axis_of_all()
    rank, parts = axis.get_local_rank(), mirrored(50, 2)
    own = [parts.take(tensor, rank, 2).requires_grad_() for tensor in whole((4, 4), 50)]
    for way in WAYS:

        def attend(*tensors: torch.Tensor, way: str = way) -> torch.Tensor:
            return attention(*tensors, Causal() & SoftCap(3.0), axis=axis, parts=parts, way=way)

        expected = attend(*own)
        wanted = torch.autograd.grad(expected.square().sum(), own)
        again: Any = checkpoint(attend, *own, use_reentrant=False)
        for grad, wish in zip(torch.autograd.grad(again.square().sum(), own), wanted, strict=True):
            assert torch.equal(grad, wish)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert torch.equal(attend(*own), expected)
        strided = [tensor.detach().transpose(1, 2).contiguous().transpose(1, 2) for tensor in own]
        torch.testing.assert_close(attend(*strided), expected)
        torch._dynamo.reset()
        compiled = torch.compile(lambda *tensors, attend=attend: 2 * attend(*tensors), backend="aot_eager")
        torch.testing.assert_close(compiled(*own), 2 * expected)
        key_alone = [own[0].detach(), own[1], own[2].detach()]
        (grad,) = torch.autograd.grad(attend(*key_alone).square().sum(), [own[1]])
        torch.testing.assert_close(grad, wanted[1])
        query_alone = [own[0], own[1].detach(), own[2].detach()]
        (grad,) = torch.autograd.grad(attend(*query_alone).square().sum(), [own[0]])
        torch.testing.assert_close(grad, wanted[0])
        both = own[1].detach().requires_grad_()
        single = [own[1].detach().requires_grad_() for _ in range(2)]
        (grad,) = torch.autograd.grad(attend(own[0], both, both).sum(), [both])
        torch.testing.assert_close(grad, sum(torch.autograd.grad(attend(own[0], *single).sum(), single)))
        narrow = [tensor.detach().float().requires_grad_() for tensor in own]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = attend(*narrow)
            assert result.dtype == torch.bfloat16
            grads = torch.autograd.grad(result.float().square().sum(), narrow)
        for grad, wish in zip(grads, wanted, strict=True):
            assert grad.dtype == torch.float32
            torch.testing.assert_close(grad.double(), wish, rtol=0.1, atol=0.1)


@on_ranks(2, 3, 4)
def test_bytes_are_the_plans() -> None:
    axis = axis_of_all()
    rank, num_ranks = axis.get_local_rank(), axis.size()
    heads, length = (2 * num_ranks, num_ranks), 301
    for name in ("causal", "window", "causal documents"):
        rule = rule_called(name, BATCH, heads[0], length)
        for parts in cuts_of(length, num_ranks):
            own = [parts.take(tensor, rank, 2).requires_grad_() for tensor in whole(heads, length, (8, 4))]
            plan = plan_of(*own, rule, parts)
            for way in WAYS:
                with disttrain.count_collectives() as there:
                    result = attention(*own, rule, axis=axis, parts=parts, way=way)
                with disttrain.count_collectives() as back:
                    result.sum().backward()
                forward, backward = plan.sent_bytes(rank, way)
                # Of heads, an all-to-all is handed what stays here too.
                kept = own_bytes(own, num_ranks) if way == "heads" else 0
                assert (bytes_of(there), bytes_of(back)) == (forward + kept, backward + kept)


def own_bytes(own: list[torch.Tensor], num_ranks: int) -> int:
    """Of a rank's share of the heads of its own positions, of queries, keys, values and results."""
    query, _, value = own
    results = query[..., :1].numel() * value.shape[3] * query.itemsize
    return (sum(tensor.nbytes for tensor in own) + results) // num_ranks


def bytes_of(counted: Any) -> int:
    """Bytes handed to transports that are not the ranks' comparing."""
    return sum(count.num_bytes for (_, name), count in counted.counts.items() if name != "all_gather_into_tensor")


@on_ranks(4)
def test_axes_that_are_none() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    own = whole((4, 4), 6)
    with pytest.raises(MeshError, match="2 axes"):
        attention(*own, axis=mesh)
    with pytest.raises(ShapeError, match="no axis"):
        attention(*own, parts=contiguous(12, 2))
    parts = mirrored(25, 2)
    assert_as_one_process(mesh["cp"], [(parts, "ring")], Causal(), (4, 2))


@on_ranks(2, 4)
def test_dtensors_cut_along_positions() -> None:
    """One run each, as DTensors are cut, or the parts given; beside an axis that cuts heads."""
    num_ranks = disttrain.get_world_size()
    mesh = disttrain.init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("cp", "tp"))
    axis, rule = mesh["cp"], Causal() & Alibi(0.5 ** torch.arange(1.0, 5))
    for length in (16, 9):
        tensors = [tensor.requires_grad_() for tensor in whole((4, 2), length)]
        expected = dense(*tensors, rule, None)
        weight = drawn(*expected.shape, seed=5)
        wanted = torch.autograd.grad(expected, tensors, weight)
        for way in ("ring", "gather"):
            own = [
                distribute_tensor(tensor.detach(), mesh, [Shard(2), Shard(1)]).requires_grad_() for tensor in tensors
            ]
            result: Any = attention(*own, rule, axis=axis, way=way)
            torch.testing.assert_close(result.full_tensor(), expected)
            result.backward(distribute_tensor(weight, mesh, result.placements))
            for tensor, wish in zip(own, wanted, strict=True):
                grad: Any = tensor.grad
                torch.testing.assert_close(grad.full_tensor(), wish)
    own = [distribute_tensor(tensor.detach(), mesh, [Shard(2), Shard(1)]) for tensor in tensors]
    with pytest.raises(LayoutError, match="positions"):
        attention(*own, rule)
    # Of a mesh without the axis they are a rank's positions.
    parts = mirrored(length, 2)
    local = [parts.take(tensor.detach(), axis.get_local_rank(), 2) for tensor in tensors]
    own = [distribute_tensor(tensor.contiguous(), mesh["tp"], [Shard(1)]) for tensor in local]
    result = attention(*own, rule, axis=axis, parts=parts)
    torch.testing.assert_close(result.full_tensor(), parts.take(expected, axis.get_local_rank(), 2))
