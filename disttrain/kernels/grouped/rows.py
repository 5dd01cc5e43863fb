"""Rows of tokens in the order of their experts, and back, as operators.

Nothing of it waits for the host: how many rows each expert has stays on the device.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from disttrain.errors import ShapeError
from disttrain.kernels._torch import are_plain
from disttrain.kernels.grouped.choice import kernels_of, sorter_of
from disttrain.kernels.operators import call, define, differentiate, once, refuse_second_derivative


class ExpertOrder(NamedTuple):
    """Where assignments of tokens to experts lie once they are sorted by expert.

    An assignment is one token's one choice: number `token * k + choice`. Those within an expert keep their order.
    """

    order: torch.Tensor
    """(assignments,) int64: the assignment that a sorted row holds."""
    slots: torch.Tensor
    """(assignments,) int64: the sorted row of an assignment, `order`'s inverse."""
    ends: torch.Tensor
    """(experts,) int32: the first row after each expert's; the last is the number of rows that have an expert."""


def sort_by_expert(experts: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Sorts assignments by expert, stably.

    Args:   experts  integers of any shape; those outside of 0 to num_experts - 1 are dropped: their rows come last.
    Raises: ShapeError for what are no integers, or no experts.
    """
    if experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool or num_experts < 1:
        problem = f"experts is {experts.dtype} of shape {tuple(experts.shape)}, num_experts {num_experts}."
        raise ShapeError("sort_by_expert", problem, "Give integers, and one expert at least.")
    experts = experts.reshape(-1)
    sort = _sort if are_plain((experts,)) else torch.ops.disttrain.expert_sort
    return ExpertOrder(*sort(experts, num_experts))


def take_rows(x: torch.Tensor, order: ExpertOrder, k: int) -> torch.Tensor:
    """Copies each token's row to the sorted rows of its k assignments.

    Args:    x  (tokens, D).
    Returns: (tokens * k, D); zeros in rows that have no expert.
    Raises:  ShapeError where tokens and assignments don't fit.
    """
    if x.dim() != 2 or x.shape[0] * k != order.order.shape[0]:
        problem = f"x has shape {tuple(x.shape)}, and k is {k}, of {len(order.order)} assignments."
        raise ShapeError("take_rows", problem, "Give (tokens, D) of as many tokens as were sorted.")
    if are_plain((x, *order)):
        return _Take.apply(x, *order, k)  # type: ignore[no-any-return, no-untyped-call]
    return call(TAKE, x, *order, k)  # type: ignore[no-any-return]


def combine_rows(rows: torch.Tensor, order: ExpertOrder, weights: torch.Tensor) -> torch.Tensor:
    """Sums each token's k sorted rows by its weights, in fp32 at least.

    Args:    rows     (tokens * k, D), sorted.
             weights  (tokens, k).
    Returns: (tokens, D); rows without an expert count as zeros, whatever they hold.
    Raises:  ShapeError where they don't fit.
    """
    if rows.dim() != 2 or weights.dim() != 2 or not rows.shape[0] == weights.numel() == order.order.shape[0]:
        problem = f"rows has shape {tuple(rows.shape)}, weights {tuple(weights.shape)}, {len(order.order)} were sorted."
        raise ShapeError("combine_rows", problem, "Give (tokens * k, D) and (tokens, k).")
    if are_plain((rows, *order, weights)):
        return _Combine.apply(rows, *order, weights)  # type: ignore[no-any-return, no-untyped-call]
    return call(COMBINE, rows, *order, weights)  # type: ignore[no-any-return]


class _Take(torch.autograd.Function):
    """`TAKE` without the dispatcher, where nobody watches operators: the host takes a fifth of the time."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        _keep_take(ctx, arguments, None)
        return _take(*arguments)

    @staticmethod
    @once("expert_take")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        slots, ends = ctx.saved_tensors
        return _sum(grad, slots, ends, ctx.k), None, None, None, None


class _Combine(torch.autograd.Function):
    """`COMBINE` likewise."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        _keep_combine(ctx, arguments, None)
        return _combine(*arguments)

    @staticmethod
    @once("expert_combine")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_rows, grad_weights = _combine_backward(grad, *ctx.saved_tensors)
        return grad_rows, None, None, None, grad_weights


def _sort(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    plain = experts.to(torch.int64).contiguous()
    return sorter_of(plain).sort(plain, num_experts)


def _sort_shapes(experts: torch.Tensor, num_experts: int) -> Any:
    indices = [experts.new_empty(experts.shape, dtype=torch.int64) for _ in range(2)]
    return *indices, experts.new_empty(num_experts, dtype=torch.int32)


def _take(x: torch.Tensor, order: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, k: int) -> torch.Tensor:
    return kernels_of(x).take(x.contiguous(), order, ends, k, None)


def _sum(grad: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, k: int) -> torch.Tensor:
    return kernels_of(grad).combine(grad.contiguous(), slots, ends, k, None)


def _combine(
    rows: torch.Tensor, order: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    plain = weights.contiguous()
    return kernels_of(rows).combine(rows.contiguous(), slots, ends, weights.shape[1], plain)


def _combine_backward(
    grad: torch.Tensor,
    rows: torch.Tensor,
    order: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    kernels, k, plain = kernels_of(rows), weights.shape[1], grad.contiguous()
    grad_rows = kernels.take(plain, order, ends, k, weights.contiguous())
    grad_weights = kernels.products_with(plain, rows.contiguous(), slots, ends, k)
    return grad_rows, grad_weights.view(weights.shape).to(weights.dtype)


def _keep_take(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, slots, ends, ctx.k = inputs
    ctx.save_for_backward(slots, ends)


def _backward_of_take(ctx: Any, grad: torch.Tensor) -> Any:
    return torch.ops.disttrain.expert_sum(grad, *ctx.saved_tensors, ctx.k), None, None, None, None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_combine(ctx: Any, grad: torch.Tensor) -> Any:
    grad_rows, grad_weights = torch.ops.disttrain.expert_combine_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, None, None, grad_weights


define("expert_sort(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)", _sort, _sort_shapes)
TAKE: Final = define(
    "expert_take(Tensor x, Tensor order, Tensor slots, Tensor ends, int k) -> Tensor",
    _take,
    lambda x, order, *_: x.new_empty((order.shape[0], x.shape[1])),
)
SUM: Final = define(
    "expert_sum(Tensor rows, Tensor slots, Tensor ends, int k) -> Tensor",
    _sum,
    lambda rows, slots, ends, k: rows.new_empty((rows.shape[0] // k, rows.shape[1])),
)
COMBINE: Final = define(
    "expert_combine(Tensor rows, Tensor order, Tensor slots, Tensor ends, Tensor weights) -> Tensor",
    _combine,
    lambda rows, order, slots, ends, weights: rows.new_empty((weights.shape[0], rows.shape[1])),
)
COMBINE_BACKWARD: Final = define(
    "expert_combine_backward(Tensor grad, Tensor rows, Tensor order, Tensor slots, Tensor ends, Tensor weights) "
    "-> (Tensor, Tensor)",
    _combine_backward,
    lambda grad, rows, order, slots, ends, weights: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
)
differentiate(TAKE, _keep_take, _backward_of_take)
differentiate(COMBINE, _keep_combine, _backward_of_combine)
refuse_second_derivative(SUM)
refuse_second_derivative(COMBINE_BACKWARD)
