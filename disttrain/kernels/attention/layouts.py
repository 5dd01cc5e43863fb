"""Lays what cuDNN's backward reads as torch expects it to lie.

torch keeps what cuDNN has planned for a backward by sizes and strides of query, key and value alone. It takes a plan
that was made for a result, or a gradient of it, with other strides, and what comes is wrong, without a word. So results
and their gradients must always lie as torch's forward makes results: without gaps, in the order of the query's dims.
Source: aten/src/ATen/native/cudnn/MHA.cpp of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def with_laid_gradient(result: torch.Tensor) -> torch.Tensor:
    """A result of cuDNN's attention, whose gradient will lie as it does itself."""
    if not result.requires_grad:
        return result
    return _LaidGradient.apply(result)  # type: ignore[no-any-return, no-untyped-call]


def laid_as(query: torch.Tensor, *results: torch.Tensor) -> list[torch.Tensor]:
    """The results (B, H, L, Ev) of this query, and what else has their shape, as the forward makes them."""
    order = _order_of(query)
    return [_laid(result, order) for result in results]


class _LaidGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(result: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.order = _order_of(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _laid(grad, ctx.order)


def _order_of(tensor: torch.Tensor) -> list[int]:
    """Its dims, those first whose elements lie farthest apart."""
    strides = tensor.stride()
    order: list[int] = []
    # In a graph strides may be symbols, which Dynamo compares, but does not sort.
    for dim, stride in enumerate(strides):
        place = len(order)
        while place and strides[order[place - 1]] < stride:
            place -= 1
        order.insert(place, dim)
    return order


def _laid(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor without gaps, its dims in this order in memory; a copy only where it lies otherwise."""
    return tensor.permute(*order).contiguous().permute([order.index(dim) for dim in range(len(order))])
