"""Tokens to their experts' ranks, through gated experts, and back to their sums, as one node of autograd.

What `exchange/legs.py` and `kernels/grouped` do in seven nodes, for the sake of the host: where nothing is computed
while rows are under way, and nobody watches operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch

from disttrain.dtensor import DTensor
from disttrain.experts.exchange.legs import Route
from disttrain.kernels._torch import applied_plainly, are_plain, asked_for, release_saved
from disttrain.kernels.grouped import mlp
from disttrain.kernels.grouped.choice import kernels_of
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.mlp import ExpertWeights
from disttrain.kernels.grouped.rows import ExpertOrder
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
    tensors, dtype = _parts(experts.weights), x.dtype
    for tensor in tensors:
        if tensor is not None and tensor.dtype != dtype:
            return False
    return are_plain((weights, x, *tensors))


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, *arguments: Any) -> torch.Tensor:
        *given, order, route, form, recipe = arguments
        tensors = _parts(given)
        # Those of gradients in backward, too.
        k, kernels = weights.shape[1], kernels_of(x)
        rows = kernels.take(x.contiguous(), order.order, order.ends, k, None)
        arrived = _sent(route, rows, is_back=False)
        del rows
        # Where one has nothing to compute, they may be others.
        known = kernels if x.numel() and arrived.numel() else None
        experts = _plain(tensors)
        result, gate, up = mlp.forward(
            arrived, route.ends, None, experts, form, recipe, is_cleared=False, kernels=known
        )
        returned = _sent(route, result, is_back=True)
        specs = [tensor._spec if isinstance(tensor, DTensor) else None for tensor in given]
        ctx.others = order, route, form, recipe, specs, kernels, known
        ctx.save_for_backward(weights, returned, arrived, gate, up, *tensors)
        return kernels.combine(returned, order.slots, order.ends, k, weights.contiguous())

    @staticmethod
    @once("experts")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        order, route, form, recipe, specs, kernels, known = ctx.others
        # As the engine says: on ranks that go in many nodes, it leaves out those exchanges that nobody needs.
        wants_x, wants_weights, *wanted = asked_for(ctx)
        # Before anything is sent: an activation checkpoint computes what was saved anew, on all ranks.
        weights, returned, arrived, gate, up, *tensors = ctx.saved_tensors
        release_saved(ctx)
        k, grad = weights.shape[1], grad.contiguous()
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
            kernels=known,
        )  # fmt: skip
        del arrived, gate, up
        if wants_x:
            assert grads.x is not None
            of_x = kernels.combine(_sent(route, grads.x, is_back=True), order.slots, order.ends, k, None)
        kept: list[torch.Tensor | None] = []
        is_wanted = iter(wanted)
        for of_part, tensor, spec in zip(grads[2:], tensors, specs, strict=True):
            if tensor is None or not next(is_wanted) or of_part is None:
                kept.append(None)
            else:
                kept.append(of_part if spec is None else DTensor(of_part, spec))
        return of_x, of_weights, *kept, *[None] * 4


_cross: Final = applied_plainly(_Crossing)


def _sent(route: Route, rows: torch.Tensor, *, is_back: bool) -> torch.Tensor:
    coming, _ = route.start(rows, is_back, async_op=False)
    return route.finish(coming, None, is_back)


def _parts(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """This rank's."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _plain(tensors: Any) -> ExpertWeights:
    gate, up, down, gate_bias, down_bias = tensors
    return ExpertWeights(
        gate.contiguous(),
        None if up is None else up.contiguous(),
        down.contiguous(),
        None if gate_bias is None else gate_bias.contiguous(),
        None if down_bias is None else down_bias.contiguous(),
    )
