"""Attention on a GPU: every implementation that serves, judged by fp64, both ways; choices, graphs, models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llama.config import PRESETS
from llama.model import Llama
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import DTensor, Shard, distribute_tensor
from disttrain.errors import BackendError
from disttrain.kernels import Causal, Documents, SlidingWindow, attention, attention_choices, use_kernels
from disttrain.kernels.attention.choice import machine_of
from disttrain.kernels.attention.operator import call_of
from disttrain.kernels.attention.plan import serving
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.attention import NAMES, on, rule_called, tensors, wished
from tests.cases.kernels import judge
from tests.gpu.ranks import NUM_GPU_RANKS

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what Inductor loads
    pytest.mark.filterwarnings("ignore:cuDNN SDPA backward"),  # a gradient's strides are not the result's
]


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton.language")


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def judge_all(
    inputs: list[torch.Tensor],
    rule: Any,
    dtype: torch.dtype,
    *without: str,
    seen_as: Callable[[torch.Tensor], torch.Tensor] = same,
) -> tuple[str, ...]:
    """Each implementation that serves, given what `seen_as` makes of the inputs; the names of them."""
    own = [seen_as(one.to(dtype)).requires_grad_() for one in inputs]
    names = serving(machine_of("cuda", 0), call_of(*own, rule))
    for name in names:
        if name not in without:
            try:
                judge(
                    lambda *these: attention(*map(seen_as, these), rule, by=name),  # noqa: B023
                    lambda *these: wished(rule)(*map(seen_as, these)),
                    inputs,
                    dtype,
                )
            except BaseException as error:
                error.add_note(f"by {name}, of {names}")
                raise
    return names


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_every_rule(name: str, head_dim: int) -> None:
    """Flex is compiled for 64 elements only."""
    rule = on(rule_called(name, 2, 4, 300), "cuda")
    inputs = [one.cuda() for one in tensors(2, (4, 1), 300, head_dim)]
    if head_dim == 64 or name in ("none", "causal", "window", "one-sided"):
        judge_all(inputs, rule, torch.bfloat16, *(["flex"] if head_dim != 64 else []))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("length", [1, 77, 128, 704])
def test_groups_of_heads_and_lengths(heads: tuple[int, int], length: int) -> None:
    for rule in (None, Causal()):
        inputs = [one.cuda() for one in tensors(2, heads, length, 64)]
        judge_all(inputs, rule, torch.float16, "flex")


def test_other_layouts_and_lengths() -> None:
    inputs = [one.cuda() for one in tensors(2, (4, 2), 130, 64)]
    by_place = [one.transpose(1, 2).contiguous() for one in inputs]
    judge_all(by_place, Causal(), torch.bfloat16, "flex", seen_as=lambda one: one.transpose(1, 2))
    judge_all(inputs, Causal(), torch.bfloat16, "flex", seen_as=lambda one: one[..., 1:62])
    judge_all(inputs, Causal() & SlidingWindow(30), torch.bfloat16, "flex", seen_as=lambda one: one[:, :, 3:])
    judge_all(inputs, Causal(), torch.bfloat16, "flex", seen_as=lambda one: one[:, :, :, 3:59])
    longer = [one.cuda() for one in tensors(1, (4, 2), 40, 64, num_keys=200)]
    assert judge_all(longer, Causal(), torch.bfloat16, "flex") == ("efficient", "flex")
    assert judge_all(inputs, None, torch.float32, "flex") == ("efficient", "flex")
    judge(lambda *own: attention(*own, Causal()), wished(Causal()), [one[:0] for one in inputs], torch.bfloat16)


def test_documents_of_uneven_lengths_by_one_kernel() -> None:
    """A second length compiles for all, ids are an argument."""
    for length in (300, 520, 1000, 1030):
        ids = (torch.rand(2, length, generator=torch.Generator().manual_seed(length)) < 0.02).cumsum(-1)
        rule = Causal() & Documents(ids.cuda())
        inputs = [one.cuda() for one in tensors(2, (4, 2), length, 64)]
        judge(lambda *own: attention(*own, rule), wished(rule), inputs, torch.bfloat16)  # noqa: B023
    judge(lambda *own: checkpointed(rule, *own), wished(rule), inputs, torch.bfloat16)


def checkpointed(rule: Any, *own: torch.Tensor) -> torch.Tensor:
    result = checkpoint(lambda *these: attention(*these, rule), *own, use_reentrant=False)
    assert isinstance(result, torch.Tensor)
    return result


def test_a_shape_is_measured_once_and_its_choice_serves() -> None:
    inputs = [one.cuda().bfloat16().requires_grad_() for one in tensors(1, (8, 2), 2048, 128)]
    before = len(attention_choices())
    for _ in range(2):
        checkpointed(Causal(), *inputs).sum().backward()
    choice = attention_choices()[-1]
    assert len(attention_choices()) == before + 1
    assert {name for name, _ in choice.seconds} == {"cudnn", "flash", "efficient"}
    assert choice.name == min(choice.seconds, key=lambda pair: pair[1])[0]
    print(choice)


@pytest.mark.parametrize("name", ["causal", "one-sided", "causal documents"])
def test_graphs(name: str) -> None:
    """Of Inductor, of a length that is a symbol, and of CUDA."""
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True)
    for length in (256, 300, 420):
        rule = on(rule_called(name, 2, 4, length), "cuda")
        inputs = [one.cuda() for one in tensors(2, (4, 2), length, 64)]
        judge(lambda *own: compiled(*own, rule), wished(rule), inputs, torch.bfloat16)  # noqa: B023
    if name == "causal":
        own = [one.bfloat16() for one in inputs]
        attention(*own, rule)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = attention(*own, rule, scale=0.125)
        graph.replay()
        torch.testing.assert_close(result.double(), wished(rule)(*(one.double() for one in own)), atol=3e-2, rtol=3e-2)


def test_a_model_s_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    exact = Llama(PRESETS["small"]).cuda().double()
    exact.init()
    model = copy.deepcopy(exact).bfloat16()
    plain = copy.deepcopy(model)
    assert "attention" in {one.what for one in use_kernels(model, report=lambda _: None)}
    tokens = torch.randint(0, 256, (2, 200), device="cuda")
    results = [each(tokens) for each in (exact, plain, model)]
    # Whoever was first in this process to call attention so has measured it.
    assert [one.rule for one in attention_choices() if one.call.num_queries == 200] == ["Causal"]
    true, theirs, ours = (one.double() for one in results)
    assert (ours - true).norm() < 1.2 * (theirs - true).norm()


def test_what_no_kernel_takes_is_refused_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [one.cuda() for one in tensors(1, (2, 1), 9, 64)]
    monkeypatch.setenv("DISTTRAIN_KERNELS", "triton")
    with pytest.raises(BackendError, match="attention: no kernel takes"):
        attention(*inputs)
    monkeypatch.setenv("DISTTRAIN_KERNELS", "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.testing.assert_close(attention(*inputs), wished(None)(*inputs))


@on_ranks(NUM_GPU_RANKS)
def test_heads_cut_among_gpus() -> None:
    mesh = disttrain.init_device_mesh("cuda", (NUM_GPU_RANKS,))
    whole = [one.bfloat16().cuda() for one in tensors(2, (8, 4), 130, 64)]
    own = [distribute_tensor(one, mesh, [Shard(1)]).requires_grad_() for one in whole]
    found = attention(own[0], own[1], own[2], Causal())
    assert isinstance(found, DTensor)
    exact = [one.double().requires_grad_() for one in whole]
    expected = wished(Causal())(*exact)
    torch.testing.assert_close(found.full_tensor().double(), expected, atol=3e-2, rtol=3e-2)
    found.backward(distribute_tensor(torch.ones_like(whole[0]), mesh, [Shard(1)]))
    expected.sum().backward()
    for one, other in zip(own, exact, strict=True):
        assert isinstance(one.grad, DTensor)
        assert other.grad is not None
        torch.testing.assert_close(one.grad.full_tensor().double(), other.grad, atol=6e-2, rtol=3e-2)
