"""A linear layer cut by its inputs: each rank has a term of every output, and the terms are summed up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from disttrain.dtensor import DTensor, Spec
from disttrain.process_group import P2POp, batch_isend_irecv, irecv, isend
from disttrain.tp.axis import Axis
from disttrain.tp.gathering import Gather, gather_and_multiply, multiply_into
from disttrain.tp.linears import Matrix, refuse_second_derivative
from disttrain.tp.params import Cut
from disttrain.tp.transfers import all_reduce, gather, reduce_scatter


@dataclass(frozen=True)
class Row:
    """How the layer is cut, and what becomes of the sum: `dim` is that along which ranks keep parts of it, None where
    each has the whole. `input` and `output` are specs where these are DTensors. `overlap`: parts of the sum are sent
    one by one under the multiplications."""

    axis: Axis
    matrix: Matrix
    weight: Cut
    bias: Cut
    dim: int | None
    input: Spec | None
    output: Spec | None
    overlap: bool


def row(x: torch.Tensor, plan: Row, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x, of which this rank has some columns, times the matrix; the bias is added once."""
    return _Row.apply(x, plan, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: Row, weight: Any, bias: Any) -> torch.Tensor:
        part = x if plan.input is None else x._local_tensor  # type: ignore[attr-defined]
        used = plan.weight.used(weight)
        if plan.dim is None:
            result = all_reduce(plan.matrix.times(part, used, None), plan.axis)
        elif plan.overlap:
            result = _multiply_and_send(part, used, plan, plan.dim)
        else:
            result = reduce_scatter(plan.matrix.times(part, used, None), plan.dim, plan.axis)
        if bias is not None:
            result += plan.bias.used(bias)
        ctx.plan = plan
        ctx.save_for_backward(part, weight, bias)
        return result if plan.output is None else DTensor(result, plan.output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_second_derivative("RowwiseParallel")
        plan: Row = ctx.plan
        part, weight, bias = ctx.saved_tensors
        if plan.output is not None:
            assert isinstance(grad, DTensor)
            grad = grad.redistribute(placements=plan.output.placements)._local_tensor
        needs_x, _, needs_weight, needs_bias = ctx.needs_input_grad
        used = plan.weight.used(weight)
        x_grad = weight_grad = bias_grad = None
        if plan.dim is not None and plan.overlap and needs_x:
            back = Matrix(out_dim=plan.matrix.in_dim)
            grad, (x_grad,) = gather_and_multiply(grad, Gather(plan.axis, plan.dim, True), [back], [used], [None])
        elif plan.dim is not None:
            grad = gather(grad, plan.dim, plan.axis)
        flat = grad.flatten(0, -2)
        if needs_x:
            x_grad = plan.matrix.times_transposed(flat, used) if x_grad is None else x_grad
            x_grad = x_grad.view(part.shape)
            x_grad = x_grad if plan.input is None else DTensor(x_grad, plan.input)
        if needs_weight:
            weight_grad = plan.weight.grad(plan.matrix.weight_grad(flat, part.flatten(0, -2)), weight._spec)
        if needs_bias:
            bias_grad = plan.bias.grad(flat.sum(0), bias._spec)
        return x_grad, None, weight_grad, bias_grad


def _multiply_and_send(part: torch.Tensor, weight: torch.Tensor, plan: Row, dim: int) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum of all ranks' products."""
    axis, matrix = plan.axis, plan.matrix
    width = weight.shape[matrix.out_dim]
    lead, depth = math.prod(part.shape[:dim]), part.shape[-1]
    rows = math.prod(part.shape[dim:-1]) // axis.size
    x = part.contiguous().view(lead, axis.size, rows, depth)
    terms = part.new_empty((axis.size, lead, rows, width))
    works = []
    for step in range(1, axis.size):
        # What others wait for comes first; this rank's own is multiplied while that travels.
        target, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        product = part.new_empty((lead, rows, width))
        multiply_into(product, x[:, target], matrix, weight, None)
        messages = [
            P2POp(isend, product, group=axis.group, group_peer=target, tag=step),
            P2POp(irecv, terms[source], group=axis.group, group_peer=source, tag=step),
        ]
        works += batch_isend_irecv(messages)
    multiply_into(terms[axis.rank], x[:, axis.rank], matrix, weight, None)
    for work in works:
        work.wait()
    total = terms[0].add_(terms[1]) if axis.size == 2 else terms.sum(0)
    return total.view(*part.shape[:dim], part.shape[dim] // axis.size, *part.shape[dim + 1 : -1], width)
