"""A linear layer cut by its inputs: each rank has a term of every output, and the terms are summed up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from disttrain.dtensor import DTensor, Spec
from disttrain.process_group import P2POp, batch_isend_irecv, irecv, isend
from disttrain.tp.axis import Axis
from disttrain.tp.gathering import multiply_into, pays, ring_gather
from disttrain.tp.linears import Matrix
from disttrain.tp.params import Cut
from disttrain.tp.transfers import start_all_reduce, start_gather, start_reduce_scatter


@dataclass(frozen=True)
class Row:
    """How the layer is cut, and what becomes of the sum: `dim` is that along which ranks keep parts of it, None where
    each has the whole. `input` and `output` are specs where these are DTensors."""

    axis: Axis
    matrix: Matrix
    weight: Cut
    bias: Cut
    dim: int | None
    input: Spec | None
    output: Spec | None
    overlap: bool | None = None


def row(x: torch.Tensor, layer: Row, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x, of which this rank has some columns, times the matrix; the bias is added once."""
    return _Row.apply(x, layer, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Row, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        part = x if layer.input is None else x._local_tensor  # type: ignore[attr-defined]
        used = layer.weight.used(weight)
        if layer.dim is None:
            result = start_all_reduce(layer.matrix.times(part, used, None), layer.axis)()
        else:
            result = _multiply_and_scatter(part, used, layer)
        if bias is not None:
            result += layer.bias.used(bias)
        ctx.layer = layer
        ctx.save_for_backward(part, weight, bias)
        return result if layer.output is None else DTensor(result, layer.output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        layer: Row = ctx.layer
        part, weight, bias = ctx.saved_tensors
        if layer.output is not None:
            assert isinstance(grad, DTensor)
            grad = grad.redistribute(placements=layer.output.placements)._local_tensor
        needs_x, _, needs_weight, needs_bias = ctx.needs_input_grad
        matrix, used = layer.matrix, layer.weight.used(weight)
        own = grad
        if layer.dim is None:
            flat = grad.flatten(0, -2)
            x_grad = matrix.times_transposed(flat, used) if needs_x else None
        else:
            grad, x_grad = _gather_and_go_back(grad, used, layer, needs_x)
            flat = grad.flatten(0, -2)
        weight_grad = bias_grad = None
        if needs_weight:
            weight_grad = layer.weight.grad(matrix.weight_grad(flat, part.flatten(0, -2)), weight._spec)
        if bias is not None and needs_bias:
            bias_grad = layer.bias.grad(own.flatten(0, -2).sum(0), bias._spec)
        if x_grad is not None:
            x_grad = x_grad.view(part.shape)
            x_grad = x_grad if layer.input is None else DTensor(x_grad, layer.input)
        return x_grad, None, weight_grad, bias_grad


def _multiply_and_scatter(part: torch.Tensor, weight: torch.Tensor, layer: Row) -> torch.Tensor:
    """This rank's part, along `layer.dim`, of the sum of all ranks' products."""
    axis, matrix, dim = layer.axis, layer.matrix, layer.dim
    assert dim is not None
    width = weight.shape[matrix.out_dim]
    sent_bytes = math.prod(part.shape[:-1]) // axis.size * width * part.element_size()
    overlap = pays(sent_bytes, part.device, axis) if layer.overlap is None else layer.overlap
    if not overlap or axis.size == 1:
        return start_reduce_scatter(matrix.times(part, weight, None), dim, axis)()
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


def _gather_and_go_back(
    grad: torch.Tensor, weight: torch.Tensor, layer: Row, needs_x: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradient of the whole result, and from it that of this rank's columns of the input, if asked for."""
    axis, matrix, dim = layer.axis, layer.matrix, layer.dim
    assert dim is not None
    overlap = pays(grad.nbytes, grad.device, axis) if layer.overlap is None else layer.overlap
    in_place = math.prod(grad.shape[:dim]) == 1
    if not overlap or axis.size == 1 or not needs_x or not in_place:
        whole = start_gather(grad, dim, axis)()
        return whole, matrix.times_transposed(whole.flatten(0, -2), weight) if needs_x else None
    own = grad.contiguous().view(-1, grad.shape[-1])
    parts = grad.new_empty((axis.size, *own.shape))
    arriving = ring_gather(own, parts, axis)
    x_grad = grad.new_empty((axis.size, len(own), weight.shape[matrix.in_dim]))
    back = weight if matrix.out_dim == 0 else weight.t()
    for step in range(axis.size):
        source = (axis.rank + step) % axis.size
        for work in arriving[step]:
            work.wait()
        torch.mm(own if step == 0 else parts[source], back, out=x_grad[source])
    parts[axis.rank].copy_(own)
    whole = parts.view(*grad.shape[:dim], grad.shape[dim] * axis.size, *grad.shape[dim + 1 :])
    return whole, x_grad.flatten(0, 1)
