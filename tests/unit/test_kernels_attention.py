"""Attention on a CPU: every rule in fp64, groups of heads, empty and uneven sizes, graphs, checkpoints, and what is
refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from disttrain.errors import ShapeError
from disttrain.kernels import Alibi, Causal, Documents, Prefix, SlidingWindow, SoftCap, attention
from tests.cases.attention import NAMES, rule_called, tensors, wished
from tests.cases.kernels import judge, values_and_grads


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", [None, "dense"])
def test_every_rule(name: str, by: str | None) -> None:
    inputs = tensors(2, (4, 2), 200, 8)
    rule = rule_called(name, 2, 4, 200)
    judge(lambda *own: attention(*own, rule, by=by), wished(rule), inputs, torch.float64)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("length", [1, 5, 129])
def test_groups_of_heads_and_lengths(heads: tuple[int, int], length: int) -> None:
    for name in ("causal", "all"):
        rule = rule_called(name, 2, heads[0], length)
        inputs = tensors(2, heads, length, 6)
        judge(lambda *own: attention(*own, rule, scale=0.3), wished(rule, 0.3), inputs, torch.float64)  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision(dtype: torch.dtype) -> None:
    for name in ("causal", "all"):
        rule = rule_called(name, 2, 4, 70)
        judge(lambda *own: attention(*own, rule), wished(rule), tensors(2, (4, 2), 70, 16), dtype)  # noqa: B023


@pytest.mark.parametrize(("num_queries", "num_keys"), [(3, 70), (70, 3)])
def test_queries_and_keys_of_different_lengths(num_queries: int, num_keys: int) -> None:
    """Of 70 queries, the last see nothing through the window."""
    for rule in (None, Causal(), Causal() & SlidingWindow(5), Causal() & SlidingWindow(5) & SoftCap(1.0)):
        inputs = tensors(1, (2, 1), num_queries, 8, num_keys=num_keys)
        judge(lambda *own: attention(*own, rule), wished(rule), inputs, torch.float64)  # noqa: B023


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 4, 0), (2, 0, 5)], ids=str)
def test_empty(shape: tuple[int, int, int]) -> None:
    batch_size, num_heads, length = shape
    inputs = tensors(batch_size, (num_heads, num_heads // 2), length, 8)
    found = values_and_grads(lambda *own: attention(*own, Causal()), inputs)
    assert [one.shape for one in found] == [inputs[0].shape, *(one.shape for one in inputs)]
    no_keys = tensors(2, (2, 2), 3, 8, num_keys=0)
    assert torch.equal(attention(*no_keys), torch.zeros(2, 2, 3, 8, dtype=torch.float64))


def test_other_strides() -> None:
    inputs = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors(2, (4, 2), 33, 8)]
    judge(lambda *own: attention(*own, Causal()), wished(Causal()), inputs, torch.float64)


def test_values_wider_than_keys() -> None:
    query, key, value = tensors(2, (4, 2), 33, 8)
    wide = torch.cat((value, value * 2), -1)
    for rule in (Causal(), SoftCap(1.0)):
        judge(lambda *own: attention(*own, rule), wished(rule), [query, key, wide], torch.float64)  # noqa: B023


def test_a_graph_holds_it_unbroken() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    rule = rule_called("all", 2, 4, 40)
    judge(lambda *own: compiled(*own, rule), wished(rule), tensors(2, (4, 2), 40, 8), torch.float64)


def test_lengths_are_symbols_of_one_graph() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda *own: attention(*own, Causal()), fullgraph=True, backend=count)
    for length in (40, 50, 60, 70):
        compiled(*tensors(2, (4, 2), length, 8))
    assert len(graphs) == 2
    every = torch.compile(lambda *own: attention(*own, Causal()), fullgraph=True, backend="eager", dynamic=True)
    own = tensors(2, (4, 2), 40, 8)
    assert torch.equal(every(*own), attention(*own, Causal()))


def test_within_a_checkpoint_and_autocast() -> None:
    rule = rule_called("all", 2, 4, 40)
    inputs = tensors(2, (4, 2), 40, 8)

    def attend(*own: torch.Tensor) -> torch.Tensor:
        result = checkpoint(lambda *these: attention(*these, rule), *own, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result

    judge(attend, wished(rule), inputs, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*(one.float() for one in inputs), rule).dtype is torch.bfloat16


def test_rules_are_values() -> None:
    assert Causal() & SlidingWindow(3) == Causal() & SlidingWindow(3)
    assert Causal() & SlidingWindow(3) != Causal() & SlidingWindow(4)
    ids = torch.arange(3)
    assert Documents(ids) != Documents(ids)
    assert (Causal() & (SoftCap(1.0) & Causal())).parts == (Causal(), SoftCap(1.0), Causal())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SlidingWindow(0), "SlidingWindow has size 0. Give 1 or more"),
        (SoftCap(0.0), "SoftCap has cap 0.0. Give a positive"),
        (Documents(torch.zeros(2, 4, dtype=torch.long)), r"Documents has a tensor of shape \(2, 4\) .* Give \(2, 5\)"),
        (Prefix(torch.zeros(3)), r"Give \(2,\) on cpu"),
        (Causal() & Alibi(torch.zeros(2)), r"Alibi has a tensor of shape \(2,\) on cpu. Give \(4,\)"),
    ],
)
def test_rules_that_do_not_fit(rule: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        attention(*tensors(2, (4, 2), 5, 8), rule)


def test_tensors_that_do_not_fit() -> None:
    query, key, value = tensors(2, (4, 2), 5, 8)
    for wrong, message in (
        ((query, key.float(), value), "are torch.float64, torch.float32 and torch.float64. Give floats of one"),
        ((query, key[0], value[0]), r"Give \(B, H, L, E\)"),
        ((query, key[..., :4], value), r"shapes \(2, 4, 5, 8\), \(2, 2, 5, 4\)"),
        ((query[:, :3], key, value), "2 heads of keys cannot serve 3"),
    ):
        with pytest.raises(ShapeError, match=message):
            attention(*wrong)
    with pytest.raises(ShapeError, match="Give as many keys as queries"):
        attention(query[:, :, :3], key, value, Documents(torch.zeros(3)))
    with pytest.raises(ShapeError, match=r"'flash' does not serve torch.float64 .* on cpu. Known are cudnn, flash"):
        attention(query, key, value, by="flash")


def test_on_meta_only_shapes_are_computed() -> None:
    query, key, value = (one.to("meta") for one in tensors(2, (4, 2), 5, 8))
    found = attention(query, key, value, Causal() & SlidingWindow(2))
    assert found.is_meta
    assert found.shape == query.shape


def test_a_rule_stays_itself_where_heads_alone_are_cut() -> None:
    """So the blocks that are kept for the next layers are found."""
    rule = Causal() & Documents(torch.zeros(2, 5)) & Prefix(torch.zeros(2))
    assert rule.local(slice(0, 2), slice(1, 3)) == rule
    assert rule.local(slice(0, 1), slice(0, 4)) != rule
