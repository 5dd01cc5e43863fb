"""Finds out what a module of experts computes: candidates run beside it on a small copy in fp64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from disttrain.experts.models.computation import FUNCTIONS, Computation
from disttrain.experts.models.replicas import NARROW, WIDE, Replica, Results, difference_of, results
from disttrain.kernels.grouped.form import GatedForm

TOKENS: Final = 24
UNLIKE: Final = "what it computes on a small copy is none of the computations that are known"
_LIMITS: Final = ("limit", "swiglu_limit")
_ALPHAS: Final = ("alpha", "swiglu_alpha")
_KINDS: Final = {3: "routed", 2: "presorted", 1: "batched"}


def call_of(module: nn.Module) -> tuple[str, tuple[str, ...]]:
    """Tells how the module is called, read off its forward's arguments, and their names; "" where it is another way."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = tuple(parameter.name for parameter in parameters)
    is_plain = all(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )
    return _KINDS.get(len(names), "") if is_plain else "", names


def gated_forms(module: nn.Module, *, is_transposed: bool) -> Iterator[GatedForm]:
    """The forms that one kernel computes, with the limits that the module has."""
    values = vars(module)
    limits = [float(values[name]) for name in _LIMITS if isinstance(values.get(name), int | float)]
    alphas = [float(values[name]) for name in _ALPHAS if isinstance(values.get(name), int | float)]
    for is_interleaved in (False, True):
        for activation in ("silu", "gelu", "gelu_tanh"):
            yield GatedForm(activation, is_interleaved, is_transposed)
        for limit in limits:
            for alpha in (*alphas, 1.0):
                if limit > 0:
                    yield GatedForm("clamped", is_interleaved, is_transposed, limit, alpha)


def computations(module: nn.Module, weights: Any, orders: Sequence[bool] = (False,)) -> Iterator[Computation]:
    """Lists what a module with these weights may compute, the fastest first.

    Args: orders  whether up's weight may come before gate's.
    """
    norm = "post_expert_norm" if hasattr(module, "post_expert_norm") else ""
    if weights.has_gate:
        for form in gated_forms(module, is_transposed=weights.is_transposed):
            for is_reversed in orders:
                if len(weights.into) == 1 or not form.is_interleaved:
                    yield Computation(form, weights.is_transposed, norm=norm, is_reversed=is_reversed)
        if callable(getattr(module, "_apply_gate", None)):
            yield Computation(None, weights.is_transposed, "_apply_gate", norm=norm)
    takes = "gate" if weights.has_gate else "alone"
    for name in (*_functions(module), *FUNCTIONS):
        for is_reversed in orders:
            yield Computation(None, weights.is_transposed, name, takes, norm, is_reversed)


def _functions(module: nn.Module) -> Iterator[str]:
    """The names of a module's activations: its modules without parameters, and functions that it was given."""
    for name, child in module.named_modules():
        if name and not any(True for _ in child.parameters()) and not isinstance(child, nn.Identity | nn.Dropout):
            yield name
    for name, value in vars(module).items():
        if inspect.isroutine(value):
            yield name


def inputs_of(replica: Replica, kind: str, num_experts: int) -> list[tuple[torch.Tensor, ...]]:
    """Draws arguments for calls of a module, in the orders that there are."""
    if kind == "batched":
        return [(replica.drawn(3 * num_experts, replica.width, scale=3.0),)]
    if kind == "presorted":
        # Not one row for the first: counts of one may be taken for factors.
        counts = torch.tensor([(index + 2) % 3 for index in range(num_experts)])
        return [(replica.drawn(int(counts.sum()), replica.width, scale=3.0), counts)]
    k = min(2, num_experts)
    x = replica.drawn(TOKENS, replica.width, scale=3.0)
    indices, weights = replica.chosen(TOKENS, k, num_experts), replica.drawn(TOKENS, k).abs()
    orders = [(x, indices, weights), (x, weights, indices)]
    # Some take tokens as they are in the model, (batch, positions, width).
    return [*orders, *((x.view(2, -1, replica.width), *others) for _, *others in orders)]


def agreed(
    replica: Replica,
    forward: Callable[..., Any],
    candidates: Sequence[Callable[..., Any]],
    inputs: Sequence[tuple[torch.Tensor, ...]],
) -> tuple[int | None, str]:
    """The first candidate that gives what `forward` gives, in training and evaluation, or why there is none.

    One that agrees in fp64 comes before those that agree in fp32, in which some modules compute whatever they get.
    """
    problem = ""
    for arguments in inputs:
        expected, raised = _in_both_modes(replica.module, forward, arguments)
        problem = problem or raised
        if not any(tensor.numel() for outputs, _ in expected for tensor in outputs):
            continue
        nearest = (NARROW, -1)
        for index, candidate in enumerate(candidates):
            difference = _difference(expected, replica.module, candidate, arguments)
            if difference <= WIDE:
                return index, ""
            nearest = min(nearest, (difference, index))
        if nearest[1] >= 0:
            return nearest[1], ""
        problem = UNLIKE
    return None, problem


def _in_both_modes(
    module: nn.Module, forward: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> tuple[list[Results], str]:
    """Returns what a forward gives in evaluation and in training; or nothing, and what it raised."""
    both = []
    for is_training in (False, True):
        module.train(is_training)
        result, problem = attempted(module, forward, inputs)
        if result is None:
            return [], problem
        both.append(result)
    return both, ""


def _difference(
    expected: Sequence[Results], module: nn.Module, forward: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> float:
    module.train(mode=False)
    outputs, _ = attempted(module, forward, inputs, with_grads=False)
    worst = math.inf if outputs is None else difference_of((expected[0][0], []), outputs)
    if worst > NARROW:
        return math.inf
    for is_training, reference in zip((False, True), expected, strict=True):
        module.train(is_training)
        result, _ = attempted(module, forward, inputs)
        worst = max(worst, math.inf if result is None else difference_of(reference, result))
    return worst if worst <= NARROW else math.inf


def attempted(
    module: nn.Module, forward: Callable[..., Any], inputs: Sequence[torch.Tensor], *, with_grads: bool = True
) -> tuple[Results | None, str]:
    """Returns what a forward gives, or what it raised."""
    try:
        return results(module, forward, inputs, with_grads=with_grads), ""
    except Exception as error:  # noqa: BLE001  # a stranger's code may raise anything, which is told
        return None, f"on a small copy its forward raised {type(error).__name__}: {error}"
