"""Linear layers cut by their outputs: their common input is gathered once, and its gradient reduced once.

While the gradient of the input travels, the weights' are computed; so Megatron-LM does it (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from disttrain.dtensor import DTensor, Partial, Replicate, Spec
from disttrain.tp.axis import Axis
from disttrain.tp.gathering import gather_and_multiply
from disttrain.tp.linears import Matrix
from disttrain.tp.params import Cut
from disttrain.tp.transfers import Finish, start_all_reduce, start_reduce_scatter


@dataclass(frozen=True)
class Column:
    """One linear layer: how it holds its matrix, how its parameters are cut, and how its result lies.

    `wraps`: the result is given as a DTensor, else as this rank's part.
    """

    matrix: Matrix
    weight: Cut
    bias: Cut
    output: Spec | None


@dataclass(frozen=True)
class ColumnInput:
    """How the input comes. `dim` is that along which ranks have parts, None where each has the whole.

    `spec` is that of a DTensor. The gradient of a whole plain input is summed over the ranks; that of a whole DTensor
    is left as terms of the sum, which others may join.
    """

    axis: Axis
    dim: int | None
    spec: Spec | None
    overlap: bool | None = None


def columns(
    x: torch.Tensor,
    given: ColumnInput,
    layers: Sequence[Column],
    parameters: Sequence[torch.Tensor | None],
    *,
    keeps_whole: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The results of `layers`, whose weights and biases take turns in `parameters`; after the whole input, if asked."""
    return _Columns.apply(x, given, tuple(layers), keeps_whole, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        given: ColumnInput,
        layers: tuple[Column, ...],
        keeps_whole: bool,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        part = x if given.spec is None else x._local_tensor  # type: ignore[attr-defined]
        weights = [layer.weight.used(weight) for layer, weight in zip(layers, parameters[::2], strict=True)]
        biases = [
            None if bias is None else layer.bias.used(bias)
            for layer, bias in zip(layers, parameters[1::2], strict=True)
        ]
        matrices = [layer.matrix for layer in layers]
        if given.dim is None:
            whole = part
            results = [m.times(whole, w, b) for m, w, b in zip(matrices, weights, biases, strict=True)]
        else:
            whole, results = gather_and_multiply(part, given.dim, given.axis, given.overlap, matrices, weights, biases)
        ctx.given, ctx.layers, ctx.keeps_whole = given, layers, keeps_whole
        ctx.save_for_backward(whole, *parameters)
        ctx.set_materialize_grads(False)
        given_on = [
            result if layer.output is None else _wrapped(result, layer.output)
            for result, layer in zip(results, layers, strict=True)
        ]
        if keeps_whole:
            given_on.insert(0, _wrapped(whole, given.axis.spec(Replicate(), whole.shape, whole.dtype)))
        return tuple(given_on)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        given: ColumnInput = ctx.given
        layers: tuple[Column, ...] = ctx.layers
        whole, *parameters = ctx.saved_tensors
        whole_grad, results_grads = (grads[0], grads[1:]) if ctx.keeps_whole else (None, grads)
        flat = [
            None if grad is None else _part_of(grad, layer).flatten(0, -2)
            for grad, layer in zip(results_grads, layers, strict=True)
        ]
        finish = None
        if ctx.needs_input_grad[0]:
            finish = _start_input_grad(given, whole, whole_grad, flat, layers, parameters)
        rows = whole.flatten(0, -2)
        found: list[torch.Tensor | None] = []
        for place, (layer, grad) in enumerate(zip(layers, flat, strict=True)):
            weight, bias = parameters[2 * place : 2 * place + 2]
            needs_weight, needs_bias = ctx.needs_input_grad[4 + 2 * place : 6 + 2 * place]
            if grad is None:
                found += [None, None]
                continue
            found.append(
                layer.weight.grad(layer.matrix.weight_grad(grad, rows), weight._spec) if needs_weight else None
            )
            found.append(layer.bias.grad(grad.sum(0), bias._spec) if bias is not None and needs_bias else None)
        return (finish() if finish is not None else None), None, None, None, *found


def _start_input_grad(
    given: ColumnInput,
    whole: torch.Tensor,
    whole_grad: torch.Tensor | None,
    grads: Sequence[torch.Tensor | None],
    layers: Sequence[Column],
    parameters: Sequence[Any],
) -> Finish:
    """Sum up what the layers give for the input, and begin to send it."""
    total = None
    for layer, grad, weight in zip(layers, grads, parameters[::2], strict=True):
        if grad is None:
            continue
        used = layer.weight.used(weight)
        if total is None:
            total = layer.matrix.times_transposed(grad, used)
        else:
            layer.matrix.add_times_transposed(total, grad, used)
    if total is None:
        total = whole.new_zeros(whole.shape)
    total = total.view(whole.shape)
    axis, spec = given.axis, given.spec
    if whole_grad is not None:
        _add_term(total, whole_grad, axis)
    if given.dim is None:
        if spec is not None:
            return lambda: DTensor(total, spec.with_layout(axis.layout(Partial())))
        return start_all_reduce(total, axis)
    finish = start_reduce_scatter(total, given.dim, axis)
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


def _wrapped(part: torch.Tensor, spec: Spec) -> DTensor:
    return DTensor(part, spec)
