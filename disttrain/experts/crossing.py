"""Rows of tokens to their experts' ranks, through gated experts, and back, as one node of autograd.

What `exchange/legs.py` and `kernels/grouped/products.py` do in six nodes, for the sake of the host: where nothing is
computed while rows are under way, and nobody watches operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from disttrain.experts.exchange.legs import Route
from disttrain.kernels._torch import are_plain, release_saved
from disttrain.kernels.grouped import mlp
from disttrain.kernels.grouped.choice import kernels_of
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.mlp import ExpertWeights
from disttrain.kernels.grouped.rows import ExpertOrder
from disttrain.kernels.operators import once


@dataclass(frozen=True)
class GatedExperts:
    """This rank's experts, one or more, as `expert_mlp` takes them."""

    weights: ExpertWeights
    form: GatedForm
    recipe: str

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Gate, up, down and the biases of gate and down."""
        weights = self.weights
        return weights.gate, weights.up, weights.down, weights.gate_bias, weights.down_bias


def crossed(x: torch.Tensor, order: ExpertOrder, k: int, route: Route, experts: GatedExperts) -> torch.Tensor:
    """The output of experts for each choice's row, (tokens * k, D), as `order` sorts them. Collective, and in backward.

    Args: x  (tokens, D), of the weights' dtype.
    """
    rows: torch.Tensor = _cross(x, *experts.tensors(), order, k, route, experts.form, experts.recipe)
    return rows


def can_cross(x: torch.Tensor, experts: GatedExperts, trains_elsewhere: bool) -> bool:
    """True where nobody watches operators, nothing is cast, and gradients are exchanged if those of any rank are."""
    tensors = (x, *experts.tensors())
    if not are_plain(tensors) or any(tensor is not None and tensor.dtype != x.dtype for tensor in tensors):
        return False
    return not trains_elsewhere or any(tensor is not None and tensor.requires_grad for tensor in tensors)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        *tensors, order, k, route, form, recipe = arguments
        rows = kernels_of(x).take(x.contiguous(), order.order, order.ends, k, None)
        arrived = _sent(route, rows, is_back=False)
        del rows
        weights = _plain(tensors)
        result, gate, up = mlp.forward(arrived, route.ends, None, weights, form, recipe, is_cleared=False)
        ctx.others = order, k, route, form, recipe
        ctx.save_for_backward(arrived, gate, up, *tensors)
        return _sent(route, result, is_back=True)

    @staticmethod
    @once("experts")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        order, k, route, form, recipe = ctx.others
        wanted = ctx.needs_input_grad
        # Before anything is sent: an activation checkpoint computes what was saved anew, on all ranks.
        arrived, gate, up, *tensors = ctx.saved_tensors
        release_saved(ctx)
        grads = mlp.backward(
            _sent(route, grad.contiguous(), is_back=False), arrived, route.ends, None, _plain(tensors), gate, up, form,
            recipe, wanted[0], any(wanted[1:6]), is_cleared=False,
        )  # fmt: skip
        del arrived, gate, up
        of_x = None
        if wanted[0]:
            assert grads.x is not None
            rows = _sent(route, grads.x, is_back=True)
            of_x = kernels_of(rows).combine(rows, order.slots, order.ends, k, None)
        of_experts = (grads.gate, grads.up, grads.down, grads.gate_bias, grads.down_bias)
        return (
            of_x,
            *(each if wants else None for each, wants in zip(of_experts, wanted[1:6], strict=True)),
            *[None] * 5,
        )


_cross: Final[Any] = _Crossing.apply


def _sent(route: Route, rows: torch.Tensor, *, is_back: bool) -> torch.Tensor:
    coming, work = route.start(rows, is_back)
    return route.finish(coming, work, is_back)


def _plain(tensors: Any) -> ExpertWeights:
    gate, *others = tensors
    return ExpertWeights(gate.contiguous(), *(None if tensor is None else tensor.contiguous() for tensor in others))  # type: ignore[arg-type]
