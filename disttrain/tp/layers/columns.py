"""Linear layers cut by their outputs: their common input is gathered once, and its gradient reduced once.

While the gradient of the input travels, the weights' are computed; so Megatron-LM does it (arXiv 2205.05198).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from disttrain.dtensor import DTensor, Partial, Replicate, Spec
from disttrain.tp._torch import as_own
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.gathering import Cutting, gather_and_multiply, start_scatter
from disttrain.tp.layers.linears import (
    Matrix,
    input_grad,
    local_of,
    parameter_grads,
    refuse_second_derivative,
    without_autocast,
)
from disttrain.tp.layers.params import Cut
from disttrain.tp.layers.transfers import Finish, start_all_reduce
from disttrain.weight_grads import current_keeper, now_or_later


@dataclass(frozen=True)
class Column:
    """One linear layer: how it holds its matrix, how its parameters are cut, and how its result lies, where that is
    given as a DTensor; else it is this rank's part."""

    matrix: Matrix
    weight: Cut
    bias: Cut
    output: Spec | None


@dataclass(frozen=True)
class Columns:
    """The plan for inputs of one form.

    `cutting` is None where each rank has the whole input. `spec` is the input's where it is a DTensor. The gradient of
    a whole plain input is summed over the ranks; that of a whole DTensor is left as terms of the sum, which others may
    join. `whole` is the spec of the whole input, where that is given out before the results.
    """

    axis: Axis
    cutting: Cutting | None
    spec: Spec | None
    layers: tuple[Column, ...]
    whole: Spec | None = None


def columns(x: torch.Tensor, plan: Columns, parameters: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """The results of the plan's layers, whose weights and biases take turns in `parameters`."""
    return _Columns.apply(x, plan, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, plan: Columns, *parameters: Any) -> tuple[torch.Tensor, ...]:
        part = x if plan.spec is None else x._local_tensor
        layers = plan.layers
        weights = [layer.weight.used(weight) for layer, weight in zip(layers, parameters[::2], strict=True)]
        biases = [
            None if bias is None else layer.bias.used(bias)
            for layer, bias in zip(layers, parameters[1::2], strict=True)
        ]
        matrices = [layer.matrix for layer in layers]
        if plan.cutting is None:
            whole = part
            results = [m.times(whole, w, b) for m, w, b in zip(matrices, weights, biases, strict=True)]
        else:
            whole, results = gather_and_multiply(part, plan.cutting, matrices, weights, biases)
        results = [as_own(result) for result in results]
        given_whole = None if plan.whole is None else DTensor(whole.clone() if whole is part else whole, plan.whole)
        ctx.plan = plan
        ctx.keeper, ctx.parameters = current_keeper(), parameters
        # What is given out or came as a DTensor is kept as that: its version tells whether it was written to.
        saved = x if whole is part else whole if given_whole is None else given_whole
        ctx.save_for_backward(saved, *parameters)
        ctx.set_materialize_grads(False)
        given_out = [
            result if layer.output is None else DTensor(result, layer.output)
            for result, layer in zip(results, layers, strict=True)
        ]
        if given_whole is not None:
            given_out.insert(0, given_whole)
        return tuple(given_out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        refuse_second_derivative("ColwiseParallel")
        first = next((grad for grad in grads if grad is not None), None)
        with nullcontext() if first is None else without_autocast(first.device):
            return _Columns._grads(ctx, grads)

    @staticmethod
    def _grads(ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        plan: Columns = ctx.plan
        whole, *parameters = ctx.saved_tensors
        whole = local_of(whole)
        needed = ctx.needs_input_grad
        whole_grad, result_grads = (None, grads) if plan.whole is None else (grads[0], grads[1:])
        flat = [
            None if grad is None else _part_of(grad, layer).flatten(0, -2)
            for grad, layer in zip(result_grads, plan.layers, strict=True)
        ]
        finish = _start_input_grad(plan, whole, whole_grad, flat, parameters) if needed[0] else None
        input_grads: list[torch.Tensor | None] = [None, None]
        rows = whole.flatten(0, -2)
        for index, (layer, grad) in enumerate(zip(plan.layers, flat, strict=True)):
            layer_parameters = zip(ctx.parameters[2 * index :][:2], needed[2 * index + 2 :][:2], strict=True)
            wanted = [
                parameter if grad is not None and is_needed else None for parameter, is_needed in layer_parameters
            ]
            compute = functools.partial(parameter_grads, layer.matrix, (layer.weight, layer.bias), wanted, rows, grad)
            input_grads += now_or_later(ctx.keeper, wanted, compute)
        if finish is not None:
            input_grads[0] = finish()
        return tuple(input_grads)


def _start_input_grad(
    plan: Columns,
    whole: torch.Tensor,
    whole_grad: torch.Tensor | None,
    grads: Sequence[torch.Tensor | None],
    parameters: Sequence[Any],
) -> Finish:
    """Sum up what the layers give for the input, and begin to send it."""
    terms = [
        (layer.matrix, grad, layer.weight.used(weight))
        for layer, grad, weight in zip(plan.layers, grads, parameters[::2], strict=True)
        if grad is not None
    ]
    total = input_grad(*zip(*terms, strict=True)).view(whole.shape) if terms else whole.new_zeros(whole.shape)
    axis, spec = plan.axis, plan.spec
    if whole_grad is not None:
        _add_term(total, whole_grad, axis)
    if plan.cutting is None:
        if spec is not None:
            return lambda: DTensor(total, spec.with_layout(axis.layout(Partial())))
        return start_all_reduce(total, axis.group)
    finish = start_scatter(total, plan.cutting)
    return finish if spec is None else lambda: DTensor(finish(), spec)


def _add_term(total: torch.Tensor, grad: torch.Tensor, axis: Axis) -> None:
    """Add to this rank's term what others who used the whole input gave for it: a sum counts once, on one rank."""
    assert isinstance(grad, DTensor)
    if grad.placements[0].is_partial("sum"):
        total.add_(grad._local_tensor)
        return
    whole = grad.redistribute(placements=[Replicate()])._local_tensor
    if axis.rank == 0:
        total.add_(whole)


def _part_of(grad: torch.Tensor, layer: Column) -> torch.Tensor:
    if layer.output is None:
        return grad
    assert isinstance(grad, DTensor)
    return grad.redistribute(placements=layer.output.placements)._local_tensor
