"""The same multiplications for compilers: each with its communication is one operator of the graph.

A graph would put the collective before or behind the product; within an operator, part by part, one runs under the
other. Its operators know plain tensors, and a group by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttrain.dtensor._torch import as_one_call
from disttrain.process_group.current import current_world
from disttrain.process_group.functional.order import run
from disttrain.tp.layers.exchange import exchange_for
from disttrain.tp.layers.gathering import Cutting, gather_and_multiply, multiply_and_scatter, start_scatter
from disttrain.tp.layers.linears import Matrix, input_grad, refuse_second_derivative

WISHES = {None: -1, False: 0, True: 1}
"""The argument that tells an operator whether parts are to be exchanged under the multiplications."""


@as_one_call
def columns_in_graph(
    part: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    out_dims: list[int],
    dim: int,
    group_name: str,
    wish: int,
) -> tuple[torch.Tensor, ...]:
    """The whole input of parts along `dim`, and its product with each matrix; the whole's gradient is each rank's term.

    Collective, and again in backward.
    """
    return _Columns.apply(part, out_dims, dim, group_name, wish, *weights, *biases)  # type: ignore[no-any-return, no-untyped-call]


@as_one_call
def row_in_graph(
    part: torch.Tensor, weight: torch.Tensor, out_dim: int, dim: int, group_name: str, wish: int
) -> torch.Tensor:
    """This rank's part along `dim` of the sum of all ranks' products. Collective, and again in backward."""
    return _Row.apply(part, weight, out_dim, dim, group_name, wish)  # type: ignore[no-any-return, no-untyped-call]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, out_dims: list[int], dim: int, group_name: str, wish: int, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[: len(out_dims)], parameters[len(out_dims) :]
        whole, *results = run(
            torch.ops.disttrain.gather_and_multiply,
            part, list(weights), list(biases), out_dims, dim, group_name, wish,
        )  # fmt: skip
        ctx.out_dims, ctx.transfer = out_dims, (dim, group_name, wish)
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(whole, *weights)
        ctx.set_materialize_grads(False)
        return (whole, *results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        refuse_second_derivative("ColwiseParallel")
        whole, *weights = ctx.saved_tensors
        flat = [
            whole.new_zeros(math.prod(whole.shape[:-1]), weight.shape[out_dim]) if grad is None else grad.flatten(0, -2)
            for grad, weight, out_dim in zip(grads[1:], weights, ctx.out_dims, strict=True)
        ]
        part_grad, *weight_grads = run(
            torch.ops.disttrain.multiply_back, grads[0], whole, flat, weights, ctx.out_dims, *ctx.transfer
        )
        bias_grads = [grad.sum(0) if has else None for grad, has in zip(flat, ctx.has_bias, strict=True)]
        return part_grad, None, None, None, None, *weight_grads, *bias_grads


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, weight: torch.Tensor, out_dim: int, dim: int, group_name: str, wish: int
    ) -> torch.Tensor:
        (result,) = run(torch.ops.disttrain.multiply_and_scatter, part, weight, out_dim, dim, group_name, wish)
        ctx.out_dim, ctx.transfer = out_dim, (dim, group_name, wish)
        ctx.save_for_backward(part, weight)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        refuse_second_derivative("RowwiseParallel")
        part, weight = ctx.saved_tensors
        whole, part_grad = run(
            torch.ops.disttrain.gather_and_multiply, grads[0], [weight], [None], [1 - ctx.out_dim], *ctx.transfer
        )
        weight_grad = Matrix(ctx.out_dim).weight_grad(whole.flatten(0, -2), part.flatten(0, -2))
        return part_grad, weight_grad, None, None, None, None


def _cutting(tensor: torch.Tensor, part_bytes: int, dim: int, group_name: str, wish: int) -> Cutting:
    group = current_world("tensor parallel").find_group("tensor parallel", group_name)
    wished = next(value for value, number in WISHES.items() if number == wish)
    return Cutting(group, dim, exchange_for(group, tensor.device, wished, part_bytes))


def _handle() -> torch.Tensor:
    """A tensor that the next operator takes, so that it stays behind this one."""
    return torch.zeros((), dtype=torch.int64)


def _own(result: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
    """The result as a tensor of its own: an operator must not return its argument, which it would on one rank."""
    return result.clone(memory_format=torch.contiguous_format) if result is argument else result.contiguous()


def _gather_and_multiply(
    part: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dims: Sequence[int],
    dim: int,
    group_name: str,
    wish: int,
    after: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    how = _cutting(part, part.nbytes, dim, group_name, wish)
    whole, results = gather_and_multiply(part, how, [Matrix(out_dim) for out_dim in out_dims], weights, biases)
    return [_handle(), _own(whole, part), *results]


def _multiply_and_scatter(
    part: torch.Tensor,
    weight: torch.Tensor,
    out_dim: int,
    dim: int,
    group_name: str,
    wish: int,
    after: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    result_numel = part.numel() // max(1, part.shape[-1]) * weight.shape[out_dim]
    how = _cutting(part, result_numel // _group_size(group_name) * part.element_size(), dim, group_name, wish)
    return [_handle(), multiply_and_scatter(part, weight, Matrix(out_dim), how)]


def _multiply_back(
    whole_grad: torch.Tensor | None,
    whole: torch.Tensor,
    grads: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    out_dims: Sequence[int],
    dim: int,
    group_name: str,
    wish: int,
    after: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The gradient of the part, and of each matrix; `whole_grad` is what others than these found for the whole."""
    how = _cutting(whole, whole.nbytes // _group_size(group_name), dim, group_name, wish)
    matrices = [Matrix(out_dim) for out_dim in out_dims]
    total = input_grad(matrices, grads, weights).view(whole.shape)
    if whole_grad is not None:
        total += whole_grad
    finish = start_scatter(total, how)
    rows = whole.flatten(0, -2)
    weight_grads = [matrix.weight_grad(grad, rows) for matrix, grad in zip(matrices, grads, strict=True)]
    return [_handle(), finish(), *weight_grads]


def _gathered_shapes(
    part: torch.Tensor,
    weights: Any,
    biases: Any,
    out_dims: Any,
    dim: int,
    group_name: str,
    wish: int,
    after: Any = None,
) -> list[torch.Tensor]:  # fmt: skip
    shape = list(part.shape)
    shape[dim] = shape[dim] * _group_size(group_name)
    results = [
        part.new_empty((*shape[:-1], weight.shape[out_dim])) for weight, out_dim in zip(weights, out_dims, strict=True)
    ]
    return [_handle_shape(), part.new_empty(shape), *results]


def _scattered_shapes(
    part: torch.Tensor, weight: torch.Tensor, out_dim: int, dim: int, group_name: str, wish: int, after: Any = None
) -> list[torch.Tensor]:
    shape = [*part.shape[:-1], weight.shape[out_dim]]
    shape[dim] = shape[dim] // _group_size(group_name)
    return [_handle_shape(), part.new_empty(shape)]


def _grad_shapes(
    whole_grad: Any, whole: torch.Tensor, grads: Any, weights: Any, out_dims: Any, dim: int, group_name: str, wish: int,
    after: Any = None,
) -> list[torch.Tensor]:  # fmt: skip
    shape = list(whole.shape)
    shape[dim] = shape[dim] // _group_size(group_name)
    return [_handle_shape(), whole.new_empty(shape), *[weight.new_empty(weight.shape) for weight in weights]]


def _group_size(group_name: str) -> int:
    return current_world("tensor parallel").find_group("tensor parallel", group_name).group_size


def _handle_shape() -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


_PLACE = "int dim, str group_name, int wish, *, Tensor? after=None) -> Tensor[]"
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gather_and_multiply(Tensor part, Tensor[] weights, Tensor?[] biases, int[] out_dims": (
        _gather_and_multiply,
        _gathered_shapes,
    ),
    "multiply_and_scatter(Tensor part, Tensor weight, int out_dim": (_multiply_and_scatter, _scattered_shapes),
    "multiply_back(Tensor? whole_grad, Tensor whole, Tensor[] grads, Tensor[] weights, int[] out_dims": (
        _multiply_back,
        _grad_shapes,
    ),
}
_library = torch.library.Library("disttrain", "FRAGMENT")
for _schema, (_implementation, _shapes) in _OPERATORS.items():
    _name = _schema.partition("(")[0]
    _library.define(f"{_schema}, {_PLACE}")
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"disttrain::{_name}", _shapes, lib=_library)
