"""Products by expert on the CPU: judged token by token in fp64, with experts that nobody chose and choices of none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from disttrain.errors import ShapeError
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.products import expert_mlp, grouped_linear, mix_experts
from disttrain.kernels.grouped.rows import combine_rows, sort_by_expert, take_rows
from tests.cases.experts import Experts, at_once, drawn_experts, forms, step_by_step, token_by_token

FORMS = list(forms())
Mixture = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Experts], torch.Tensor]


@pytest.mark.parametrize("mixture", [at_once, step_by_step])
@pytest.mark.parametrize(("form", "is_apart", "has_bias"), FORMS, ids=str)
def test_results_and_gradients_are_those_of_each_token(
    form: GatedForm, is_apart: bool, has_bias: bool, mixture: Mixture
) -> None:
    experts = drawn_experts(5, 6, 4, form, is_apart, has_bias)
    generator = torch.Generator().manual_seed(3)
    # -1 and 5 are no experts; expert 3 has no token.
    indices = torch.randint(-1, 6, (7, 2), generator=generator)
    indices[indices == 3] = 0
    _judge(mixture, indices, experts)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_all_tokens_to_one_expert_and_to_all(k: int) -> None:
    experts = drawn_experts(5, 6, 4, GatedForm(), False, False)
    _judge(at_once, torch.arange(k).expand(6, k), experts)
    _judge(at_once, torch.full((6, k), 4), experts)
    _judge(at_once, torch.full((6, k), -1), experts)


def _judge(mixture: Mixture, indices: torch.Tensor, experts: Experts) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(indices), 6, dtype=torch.float64, generator=generator)
    weights = torch.rand(indices.shape, dtype=torch.float64, generator=generator)
    leaves = [tensor.requires_grad_() for tensor in (x, weights, *experts.tensors)]
    results = [function(x, indices, weights, experts) for function in (token_by_token, mixture)]
    wish = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    expected, actual = (torch.autograd.grad(result, leaves, wish, materialize_grads=True) for result in results)
    torch.testing.assert_close(results[1], results[0])
    for grad, like in zip(actual, expected, strict=True):
        torch.testing.assert_close(grad, like)


def test_rows_are_sorted_stably_and_those_of_no_expert_come_last() -> None:
    order, slots, ends = sort_by_expert(torch.tensor([[2, 0], [9, 2], [-1, 0]]), 3)
    assert order.tolist() == [1, 5, 0, 3, 2, 4]
    assert slots[order].tolist() == list(range(6))
    assert ends.tolist() == [2, 2, 4]
    assert ends.dtype == torch.int32


def test_no_tokens() -> None:
    experts = drawn_experts(3, 6, 4, GatedForm(), False, False)
    x, weights = torch.zeros(0, 6, dtype=torch.float64, requires_grad=True), torch.zeros(0, 2, dtype=torch.float64)
    result = at_once(x, torch.zeros(0, 2, dtype=torch.int64), weights, experts)
    assert result.shape == (0, 6)
    result.sum().backward()
    assert x.grad is not None


def test_rows_past_the_last_end_are_zeros_whatever_they_hold() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    x[4:] = float("nan")
    x.requires_grad_()
    weight, bias = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, dtype=torch.float64)
    result = grouped_linear(x, weight, torch.tensor([1, 4], dtype=torch.int32), bias)
    torch.testing.assert_close(result[1:4], x[1:4] @ weight[1].T + bias[1])
    assert not result[4:].any()
    grads = torch.autograd.grad(result.sum(), (x, weight))
    assert not grads[0][4:].any()
    assert grads[1].isfinite().all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_is_as_precise_as_its_three_bits(recipe: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(32, 64, generator=generator)
    gate_up, down = torch.randn(4, 64, 64, generator=generator) / 8, torch.randn(4, 64, 32, generator=generator) / 6
    ends = torch.tensor([5, 5, 20, 30], dtype=torch.int32)
    # What nobody reads does not set the scale.
    x[30:] = 1e30
    exact, rounded = (expert_mlp(x, ends, gate_up, down, GatedForm(), float8=name) for name in ("", recipe))
    assert 0 < (rounded - exact).norm() < 0.08 * exact.norm()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_scales_are_each_experts_own(recipe: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(30, 64, generator=generator)
    gate_up, down = torch.randn(3, 64, 64, generator=generator) / 8, torch.randn(3, 64, 32, generator=generator) / 6
    ends = torch.tensor([10, 20, 30], dtype=torch.int32)
    # Rows and weights of one are so large that those of the others would vanish beside them.
    x[10:20], down[1] = x[10:20] * 2**16, down[1] * 2**16
    exact, rounded = (expert_mlp(x, ends, gate_up, down, GatedForm(), float8=name) for name in ("", recipe))
    for expert in (slice(0, 10), slice(10, 20), slice(20, 30)):
        assert 0 < (rounded[expert] - exact[expert]).norm() < 0.08 * exact[expert].norm()


def test_a_graph_holds_it_as_one_call() -> None:
    experts = drawn_experts(4, 6, 4, GatedForm(), False, False)
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    indices, weights = torch.randint(0, 4, (8, 2)), torch.rand(8, 2, dtype=torch.float64)
    compiled = torch.compile(lambda x: at_once(x, indices, weights, experts), fullgraph=True, backend="aot_eager")
    grads = [
        torch.autograd.grad(function(x).sum(), x)[0]
        for function in (compiled, lambda x: at_once(x, indices, weights, experts))
    ]
    torch.testing.assert_close(*grads)


def test_autocast_computes_in_its_dtype() -> None:
    experts = drawn_experts(4, 6, 4, GatedForm(), False, False)
    plain = Experts(experts.form, [half.float() for half in experts.halves], experts.down.float())
    x, indices, weights = torch.randn(8, 6), torch.randint(0, 4, (8, 2)), torch.rand(8, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert at_once(x, indices, weights, plain).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, e: sort_by_expert(x, 3), "integers"),
        (lambda x, e: take_rows(x, sort_by_expert(e, 3), 3), "as many tokens"),
        (lambda x, e: combine_rows(x, sort_by_expert(e, 3), torch.ones(3, 2)), "tokens \\* k"),
        (lambda x, e: grouped_linear(x, torch.ones(3, 2, 5), sort_by_expert(e, 3).ends), "as many experts"),
        (lambda x, e: grouped_linear(x, torch.ones(2, 2, 4), sort_by_expert(e, 3).ends), "as many experts"),
        (lambda x, e: _mixed(x, e, torch.ones(3, 4, 4), torch.ones(3, 4, 3)), "one hidden size"),
        (lambda x, e: _mixed(x, e, torch.ones(3, 4, 4), torch.ones(3, 5, 2)), "as many experts"),
        (lambda x, e: _mixed(x, e, (torch.ones(3, 2, 4), torch.ones(3, 3, 4)), torch.ones(3, 4, 2)), "one shape"),
        (lambda x, e: GatedForm("tanh"), "silu"),
        (lambda x, e: GatedForm("clamped"), "positive"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[torch.Tensor, torch.Tensor], object], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        call(torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int64))


def _mixed(x: torch.Tensor, experts: torch.Tensor, gate_up: object, down: torch.Tensor) -> torch.Tensor:
    order = sort_by_expert(experts, 3)
    return mix_experts(x, order, torch.ones(3, 2), gate_up, down, GatedForm())  # type: ignore[arg-type]
