"""Tokens to their experts' ranks, through gated experts, and back to their sums, as one node of autograd.

What `exchange/legs.py` and `kernels/grouped` do in seven nodes, for the sake of the host: where nothing is computed
while rows are under way, and nobody watches operators.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from disttrain.dtensor import DTensor, Spec
from disttrain.experts.exchange.legs import Route
from disttrain.kernels._torch import are_plain, asked_for, release_saved
from disttrain.kernels.grouped import mlp
from disttrain.kernels.grouped.choice import kernels_of
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.mlp import ExpertWeights
from disttrain.kernels.grouped.rows import ExpertOrder
from disttrain.kernels.grouped.table import Kernels
from disttrain.kernels.operators import once


class GatedExperts(NamedTuple):
    """This rank's experts, one or more, as `expert_mlp` takes them; weights may be DTensors, of `taken_whole`."""

    weights: ExpertWeights
    form: GatedForm
    recipe: str


def crossed(
    x: torch.Tensor, order: ExpertOrder, weights: torch.Tensor, route: Route, experts: GatedExperts
) -> torch.Tensor:
    """Each token's weighted sum of what its experts compute, (tokens, D). Collective, and in backward.

    Args: x  (tokens, D), of the experts' dtype;  order  of the tokens' choices;  weights  (tokens, k).
    """
    sums: torch.Tensor = _cross(x, weights, *experts.weights, order, route, experts.form, experts.recipe)
    return sums


def taken_whole(parameter: torch.Tensor) -> bool:
    """True for a DTensor that a crossing takes as it is, and gives its gradient: `to_local` would be a node more."""
    return type(parameter) is DTensor and parameter._spec.view_copy is None and not parameter._spec.layout.has_partial


def can_cross(x: torch.Tensor, weights: torch.Tensor, experts: GatedExperts) -> bool:
    """True where nobody watches operators, and nothing is cast."""
    tensors, dtype = [tensor for tensor in experts.weights if tensor is not None], x.dtype
    return are_plain((weights, x, *map(_part, tensors))) and all(tensor.dtype == dtype for tensor in tensors)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, *arguments: Any) -> torch.Tensor:
        *given, order, route, form, recipe = arguments
        tensors = [*map(_part, given)]
        k, kernels = weights.shape[1], kernels_of(x)
        rows = kernels.take(x.contiguous(), order.order, order.ends, k, None)
        arrived = _sent(route, rows, is_back=False)
        del rows
        result, gate, up = mlp.forward(
            arrived,
            route.ends,
            None,
            _plain(tensors),
            form,
            recipe,
            is_cleared=False,
            kernels=_known(kernels, x, arrived),
        )
        returned = _sent(route, result, is_back=True)
        ctx.others = order, route, form, recipe, [t._spec if isinstance(t, DTensor) else None for t in given]
        ctx.save_for_backward(weights, returned, arrived, gate, up, *tensors)
        return kernels.combine(returned, order.slots, order.ends, k, weights.contiguous())

    @staticmethod
    @once("experts")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        order, route, form, recipe, specs = ctx.others
        # As the engine says: on ranks that go in many nodes, it leaves out those exchanges that nobody needs.
        wants_x, wants_weights, *wanted = asked_for(ctx)
        # Before anything is sent: an activation checkpoint computes what was saved anew, on all ranks.
        weights, returned, arrived, gate, up, *tensors = ctx.saved_tensors
        release_saved(ctx)
        k, grad, kernels = weights.shape[1], grad.contiguous(), kernels_of(grad)
        of_weights = of_x = None
        if wants_weights:
            products = kernels.products_with(grad, returned, order.slots, order.ends, k)
            of_weights = products.view(weights.shape).to(weights.dtype)
        del returned
        if not wants_x and not any(wanted):
            return None, of_weights, *[None] * 9
        grads = mlp.backward(
            _sent(route, kernels.take(grad, order.order, order.ends, k, weights.contiguous()), is_back=False),
            arrived, route.ends, None, _plain(tensors), gate, up, form, recipe, wants_x, any(wanted), is_cleared=False,
            kernels=_known(kernels, grad, arrived),
        )  # fmt: skip
        del arrived, gate, up
        if wants_x:
            assert grads.x is not None
            of_x = kernels.combine(_sent(route, grads.x, is_back=True), order.slots, order.ends, k, None)
        of_experts = grads[2:]
        is_wanted = iter(wanted)
        kept = [
            _whole(grad, spec) if tensor is not None and next(is_wanted) else None
            for grad, tensor, spec in zip(of_experts, tensors, specs, strict=True)
        ]
        return of_x, of_weights, *kept, *[None] * 4


_cross: Final[Any] = _Crossing.apply


def _sent(route: Route, rows: torch.Tensor, *, is_back: bool) -> torch.Tensor:
    coming, _ = route.start(rows, is_back, async_op=False)
    return route.finish(coming, None, is_back)


def _known(kernels: Kernels, tokens: torch.Tensor, arrived: torch.Tensor) -> Kernels | None:
    """Those of tokens, where they are those of rows that have come, too: not where one has nothing to compute."""
    return kernels if tokens.numel() and arrived.numel() else None


def _part(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _whole(grad: torch.Tensor | None, spec: Spec | None) -> torch.Tensor | None:
    return grad if grad is None or spec is None else DTensor(grad, spec)


def _plain(tensors: Any) -> ExpertWeights:
    gate, *others = tensors
    return ExpertWeights(gate.contiguous(), *(None if tensor is None else tensor.contiguous() for tensor in others))  # type: ignore[arg-type]
