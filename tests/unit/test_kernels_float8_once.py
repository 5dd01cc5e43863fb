"""float8: an input of several layers is cast once, and its cast is not used where it may be out of date."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from disttrain.kernels import float8_linear
from disttrain.kernels._torch import trace_in_place_of
from disttrain.kernels.float8 import reference as float8_reference
from disttrain.kernels.float8.latest import LATEST, LatestCast
from tests.cases.kernels import drawn

RECIPES = ["tensorwise", "rowwise"]


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds to float8 in a way of its own."""
    monkeypatch.setenv("DISTTRAIN_KERNELS", "reference")


def num_casts_of(x: torch.Tensor, run: Callable[[], object]) -> int:
    with patch.object(float8_reference, "cast", wraps=float8_reference.cast) as casts:
        run()
    return sum(call.args[0].shape == x.flatten(0, -2).shape for call in casts.call_args_list)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_input_of_several_layers_is_cast_once(recipe: str) -> None:
    leaf, weights = drawn(5, 4, 32).float().requires_grad_(), [drawn(48, 32, seed=seed).float() for seed in range(3)]
    for weight in weights:
        weight.requires_grad_()
    losses = []
    for is_shared in (False, True):
        x = leaf * 1.0

        def run() -> None:
            inputs = [x if is_shared else x * 1.0 for _ in weights]  # noqa: B023
            outputs = [float8_linear(x, weight, recipe=recipe) for x, weight in zip(inputs, weights, strict=True)]
            losses.append(sum((output.square().sum() for output in outputs), torch.zeros(())))

        assert num_casts_of(x, run) == (1 if is_shared else 3)
    grads = [torch.autograd.grad(loss, [leaf, *weights]) for loss in losses]
    assert torch.equal(*losses)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert LATEST._entry is None


def test_a_cast_is_not_used_for_what_is_no_longer_there() -> None:
    leaf, weight = drawn(4, 32).float().requires_grad_(), drawn(48, 32, seed=1).float().requires_grad_()
    x = leaf * 1.0
    before = float8_linear(x, weight)
    with torch.no_grad():
        x.mul_(2.0)
    assert torch.equal(float8_linear(x, weight), 2 * before)
    # Without a transpose there is nothing for the gradient of a weight.
    x = leaf * 1.0
    float8_linear(x, weight.detach())
    assert num_casts_of(x, lambda: float8_linear(x, weight)) == 1
    assert num_casts_of(x, lambda: float8_linear(x, weight.detach())) == 0
    # A tensor of other values, precision or scales.
    assert num_casts_of(x, lambda: float8_linear(x, weight, recipe="rowwise")) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert num_casts_of(x, lambda: float8_linear(x, weight)) == 1
        assert num_casts_of(x, lambda: float8_linear(x, weight)) == 0
    # What no step has computed may be written to by graphs, of which nothing is counted.
    assert num_casts_of(leaf, lambda: [float8_linear(leaf, weight) for _ in range(2)]) == 2
    with torch.no_grad():
        assert num_casts_of(leaf, lambda: [float8_linear(leaf * 1.0, weight) for _ in range(2)]) == 2


def test_no_cast_is_used_again_once_an_input_was_written_to_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    latest = LatestCast()
    monkeypatch.setattr("disttrain.kernels.float8.linear.LATEST", latest)
    leaf, weight = drawn(4, 32).float().requires_grad_(), drawn(48, 32, seed=1).float().requires_grad_()
    x = leaf * 1.0
    before = float8_linear(x, weight)
    assert num_casts_of(x, lambda: float8_linear(x, weight)) == 0
    x.data.mul_(2.0)
    assert torch.equal(float8_linear(x, weight), 2 * before)
    x.data[:2].copy_(x.data[2:].clone())
    assert torch.equal(float8_linear(x, weight)[:2], 2 * before[2:])
    x = leaf * 1.0
    assert num_casts_of(x, lambda: [float8_linear(x, weight) for _ in range(2)]) == 2
    assert latest._entry is None


def test_views_and_detached_tensors_count_as_writes() -> None:
    leaf, weight = drawn(4, 32).float().requires_grad_(), drawn(48, 32, seed=1).float().requires_grad_()
    for write in (lambda x: x.detach().mul_(2.0), lambda x: x.view(-1).detach().mul_(2.0), lambda x: x[:].mul_(2.0)):
        x = leaf * 1.0
        before = float8_linear(x, weight)
        with torch.no_grad():
            write(x)
        assert torch.equal(float8_linear(x, weight), 2 * before)


def test_a_cast_of_inference_mode_is_of_no_use_to_a_backward() -> None:
    leaf, weight = drawn(4, 32).float().requires_grad_(), drawn(48, 32, seed=1).float()
    x = leaf * 1.0
    with torch.inference_mode():
        before = float8_linear(x, weight)
    result = float8_linear(x, weight)
    assert torch.equal(result, before)
    result.sum().backward()
    assert leaf.grad is not None


def test_a_cast_goes_with_its_input() -> None:
    x, weight = drawn(4, 32).float().requires_grad_() * 1.0, drawn(48, 32, seed=1).float()
    float8_linear(x, weight)
    assert LATEST._entry is not None
    del x
    assert LATEST._entry is None


@pytest.mark.parametrize("is_selective", [False, True])
def test_shared_casts_within_activation_checkpointing(is_selective: bool) -> None:
    """A policy sees each operator, in forward and again in the recomputation."""
    leaf, weight = drawn(4, 32).float().requires_grad_(), drawn(32, 32, seed=1).float().requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return (float8_linear(x, weight) * float8_linear(x, weight)).tanh()

    def policy(context: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_cast = op == torch.ops.disttrain.float8_cast.default
        return CheckpointPolicy.MUST_SAVE if is_cast else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if is_selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    x = leaf * 1.0
    wished = torch.autograd.grad(block(block(x)).sum(), [leaf, weight])
    x = leaf * 1.0
    float8_linear(x, weight)
    found = torch.autograd.grad(checkpoint(block, checkpoint(block, x, **options), **options).sum(), [leaf, weight])
    for one, other in zip(found, wished, strict=True):
        assert torch.equal(one, other)


def test_a_graph_has_an_operator_once_for_equal_arguments() -> None:
    library, calls = torch.library.Library("disttrain_tests", "FRAGMENT"), []
    library.define("doubled_once(Tensor x, int number) -> Tensor[]")
    library.impl("doubled_once", lambda x, number: [x * 2 + number], "CompositeExplicitAutograd")
    op = torch.ops.disttrain_tests.doubled_once.default

    def run(x: torch.Tensor, number: int) -> list[torch.Tensor]:
        calls.append(number)
        return [x * 2 + number]

    trace_in_place_of(op, run, lambda args: True, library, is_once=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        total = op(y.flatten(0, 1), 1)[0] + op(y.flatten(0, 1), 1)[0] + op(y.flatten(0, 1), 2)[0]
        y.add_(1)
        return total + op(y.flatten(0, 1), 1)[0]

    x = drawn(2, 3, 4)
    traced = aot_function(step, fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward))
    assert torch.equal(traced(x), step(x))
    # In each of its passes.
    assert calls == [1, 2, 1] * (len(calls) // 3)
