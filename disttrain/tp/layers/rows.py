"""A linear layer cut by its inputs: each rank has a term of every output, and the terms are summed up."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from disttrain.dtensor import DTensor, Spec
from disttrain.tp._torch import as_own
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.gathering import Cutting, gather_and_multiply, multiply_and_scatter
from disttrain.tp.layers.linears import Matrix, local_of, parameter_grads, refuse_second_derivative, without_autocast
from disttrain.tp.layers.params import Cut
from disttrain.tp.layers.transfers import all_reduce
from disttrain.weight_grads import current_keeper, now_or_later


@dataclass(frozen=True)
class Row:
    """The plan of a layer that is cut by rows. `cutting` says how ranks keep parts of the sum, None where each has the
    whole. `input` and `output` are specs where these are DTensors."""

    axis: Axis
    matrix: Matrix
    weight: Cut
    bias: Cut
    cutting: Cutting | None
    input: Spec | None
    output: Spec | None


def row(x: torch.Tensor, plan: Row, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x, of which this rank has some columns, times the matrix; the bias is added once."""
    return _Row.apply(x, plan, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, plan: Row, weight: Any, bias: Any) -> torch.Tensor:
        part = x if plan.input is None else x._local_tensor
        used = plan.weight.used(weight)
        if plan.cutting is None:
            result = all_reduce(plan.matrix.times(part, used, None), plan.axis.group)
        else:
            result = multiply_and_scatter(part, used, plan.matrix, plan.cutting)
        result = as_own(result)
        if bias is not None:
            result += plan.bias.used(bias)
        ctx.plan = plan
        ctx.keeper, ctx.parameters = current_keeper(), (weight, bias)
        ctx.save_for_backward(x, weight, bias)
        return result if plan.output is None else DTensor(result, plan.output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_second_derivative("RowwiseParallel")
        with without_autocast(grad.device):
            return _Row._grads(ctx, grad)

    @staticmethod
    def _grads(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: Row = ctx.plan
        part, weight, _ = ctx.saved_tensors
        part = local_of(part)
        if plan.output is not None:
            assert isinstance(grad, DTensor)
            grad = grad.redistribute(placements=plan.output.placements)._local_tensor
        needs_x, _, needs_weight, needs_bias = ctx.needs_input_grad
        used = plan.weight.used(weight)
        x_grad = None
        if plan.cutting is not None:
            back = [Matrix(out_dim=plan.matrix.in_dim)] if needs_x else []
            grad, products = gather_and_multiply(grad, plan.cutting, back, [used] * needs_x, [None] * needs_x)
            x_grad = products[0] if needs_x else None
        flat = grad.flatten(0, -2)
        if needs_x:
            x_grad = plan.matrix.times_transposed(flat, used) if x_grad is None else x_grad
            x_grad = x_grad.view(part.shape)
            x_grad = x_grad if plan.input is None else DTensor(x_grad, plan.input)
        needed = zip(ctx.parameters, (needs_weight, needs_bias), strict=True)
        wanted = [parameter if is_needed else None for parameter, is_needed in needed]
        rows = part.flatten(0, -2)
        compute = functools.partial(parameter_grads, plan.matrix, (plan.weight, plan.bias), wanted, rows, flat)
        return x_grad, None, *now_or_later(ctx.keeper, wanted, compute)
