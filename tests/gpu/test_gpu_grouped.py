"""Products by expert on a GPU, judged token by token in fp64: Triton's kernels, and torch's where they serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from disttrain.kernels.grouped import reference
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.products import expert_mlp
from disttrain.kernels.grouped.rows import sort_by_expert
from tests.cases.experts import Experts, at_once, drawn_experts, forms, step_by_step, token_by_token
from tests.cases.kernels import drawn, judge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.language")
    monkeypatch.setenv("DISTTRAIN_KERNELS", "triton")


@pytest.mark.parametrize("mixture", [at_once, step_by_step])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "is_apart", "has_bias"), list(forms()), ids=str)
def test_results_and_gradients_are_those_of_each_token(
    form: GatedForm, is_apart: bool, has_bias: bool, dtype: torch.dtype, mixture: Callable[..., torch.Tensor]
) -> None:
    experts = drawn_experts(6, 48, 40, form, is_apart, has_bias)
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(-1, 7, (150, 2), generator=generator)
    indices[indices == 3] = 0
    if form.activation == "clamped" and dtype != torch.float32:
        # What rounding moves over the limit has another gradient.
        experts.form = replace(form, limit=100.0)
    _judge(mixture, indices, experts, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(40, 33, 17), (64, 128, 96), (1, 8, 8), (300, 264, 72)], ids=str)
def test_sizes(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    count, dim, hidden = sizes
    indices = torch.randint(0, count, (201, min(3, count)), generator=torch.Generator().manual_seed(1))
    _judge(at_once, indices, drawn_experts(count, dim, hidden, GatedForm(), False, False), dtype)


@pytest.mark.parametrize("indices", [torch.full((130, 2), 4), torch.full((5, 2), -1), torch.arange(5).expand(9, 5)])
def test_all_tokens_to_one_expert_to_none_and_to_all(indices: torch.Tensor) -> None:
    _judge(at_once, indices, drawn_experts(5, 64, 32, GatedForm(), False, False), torch.bfloat16)


def _judge(mixture: Callable[..., torch.Tensor], indices: torch.Tensor, experts: Experts, dtype: torch.dtype) -> None:
    x, weights = drawn(len(indices), experts.down.shape[2 if experts.form.is_transposed else 1]), drawn(*indices.shape)
    inputs = [tensor.cuda() for tensor in (x, weights, *experts.tensors)]
    chosen = indices.cuda()
    judge(
        lambda x, w, *tensors: mixture(x, chosen, w, experts.like(list(tensors))),
        lambda x, w, *tensors: token_by_token(x, indices, w, experts.like(list(tensors))),
        inputs,
        dtype,
    )


@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 1), (1000, 7), (40000, 64), (5000, 300), (131072, 8)])
def test_rows_are_sorted_as_the_reference_sorts_them(num_rows: int, num_experts: int) -> None:
    experts = torch.randint(-1, num_experts + 1, (num_rows,), device="cuda")
    for ours, theirs in zip(sort_by_expert(experts, num_experts), reference.sort(experts, num_experts), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8(recipe: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("grouped products of float8 need a Hopper GPU")
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gate_up = (torch.randn(4, 192, 128, device="cuda") / 11).bfloat16().requires_grad_()
    down = (torch.randn(4, 128, 96, device="cuda") / 9).bfloat16().requires_grad_()
    ends = torch.tensor([37, 37, 200, 290], dtype=torch.int32, device="cuda")
    results = [expert_mlp(x, ends, gate_up, down, GatedForm(), float8=name) for name in ("", recipe)]
    assert 0 < (results[1] - results[0]).norm() < 0.08 * results[0].norm()
    wish = torch.randn_like(x)
    exact, rounded = (torch.autograd.grad(result, (x, gate_up, down), wish) for result in results)
    for grad, like in zip(rounded, exact, strict=True):
        assert (grad - like).norm() < 0.12 * like.norm()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_a_captured_step_follows_the_routing() -> None:
    experts = drawn_experts(8, 64, 32, GatedForm(), False, False)
    plain = experts.like([tensor.cuda().bfloat16().requires_grad_() for tensor in experts.tensors])
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(64, 2, device="cuda")
    indices = torch.randint(0, 8, (64, 2), device="cuda")

    def step() -> list[torch.Tensor]:
        result = at_once(x, indices, weights, plain)
        return [result, *torch.autograd.grad(result.float().square().sum(), (x, *plain.tensors))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        indices.copy_(torch.randint(0, 2 + 3 * seed, (64, 2), device="cuda"))
        graph.replay()
        for replayed, plainly in zip(captured, step(), strict=True):
            assert torch.equal(replayed, plainly)
