"""Routers of transformers, and others written like them: counted and balanced as ours are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from disttrain.errors import RoutingError
from disttrain.experts.routing.balance import Balance
from disttrain.experts.routing.choice import Routing, scores_of
from disttrain.experts.routing.counters import RouterCounters
from disttrain.experts.routing.rule import RouterRule
from disttrain.experts.routing.watch import RouterWatch
from disttrain.mesh import DeviceMesh

_NUM_TRIED = 8
"""Tokens of a trial."""


def watch_routers(
    module: nn.Module, balance: Balance | None = None, *, batch_axis: DeviceMesh | None = None
) -> tuple[str, ...]:
    """Has the routers within a model of transformers, or one written like it, counted and balanced as a `Router` is.

    Such a router has `top_k` and a weight (num_experts, hidden_size), and returns logits, weights and indices. In
    training a forward hook takes the losses, and counts for `read_statistics`; `update_expert_biases` updates the
    routers' e_score_correction_bias. State dicts keep their keys. A trial with drawn weights tells whether scores are
    softmax or sigmoid; routers with other scores are left as they are.

    Padding counts, since these routers are not told of it. Leave out the model's own balance loss, which is there with
    `output_router_logits=True`, or have none here. Call it before `fully_shard`.

    Args:    balance     see `Balance`; over a rank's tokens or the batch's. None: only count.
             batch_axis  as in `Router`.
    Returns: the names of the routers that are watched now, and were not before.
    Raises:  RoutingError for a balance over sequences, which these routers do not see.
    """
    balance = balance or Balance()
    if balance.over == "sequence":
        problem = "the balance is over sequences, and these routers are given tokens alone."
        raise RoutingError("watch_routers", problem, "Give over='rank' or over='batch'.")
    watched = []
    for name, router in list(module.named_modules()):
        rule = None if isinstance(router._modules.get("counters"), RouterCounters) else _rule_of(router)
        if rule is not None:
            router.counters = RouterWatch(rule, balance, batch_axis, next(router.parameters()).device)
            router.register_forward_hook(_watch)
            watched.append(name)
    return tuple(watched)


def _watch(router: nn.Module, args: Any, output: Any) -> Any:
    watch = router.counters
    if not router.training or not isinstance(watch, RouterWatch):
        return None
    logits, weights, indices = output
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits, watch.take(Routing(weights, indices, scores_of(wide, watch.rule), wide)), indices


@torch.no_grad()
def _rule_of(router: nn.Module) -> RouterRule | None:
    """Reads the rule of somebody else's router, as far as a watch needs it; None of a module that is none."""
    weight, top_k = getattr(router, "weight", None), getattr(router, "top_k", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not isinstance(top_k, int):
        return None
    num_experts, hidden_size = weight.shape
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(tensor.shape, generator=generator) * (tensor.dim() > 1) / hidden_size**0.5
        for name, tensor in (*router.named_parameters(), *router.named_buffers())
    }
    try:
        result = functional_call(router, drawn, torch.randn(_NUM_TRIED, hidden_size, generator=generator))
        logits, weights, indices = result
        if logits.shape != (_NUM_TRIED, num_experts) or indices.shape != (_NUM_TRIED, top_k):
            return None
        shares = _shares(weights.float())
        if top_k == 1 and torch.allclose(weights, weights[0]):
            # A weight that is divided by itself does not tell.
            has_correction = hasattr(router, "e_score_correction_bias")
            return RouterRule(num_experts, 1, score="sigmoid" if has_correction else "softmax")
        for score in ("softmax", "sigmoid"):
            rule = RouterRule(num_experts, top_k, score=score)
            if torch.allclose(shares, _shares(scores_of(logits.float(), rule).gather(1, indices)), atol=1e-4):
                return rule
    except (TypeError, ValueError, AttributeError, RuntimeError):
        pass  # It takes or gives something else.
    return None


def _shares(weights: torch.Tensor) -> torch.Tensor:
    """Weights as they are but for a factor: of each token's, or, of one weight per token, of all."""
    return weights / weights.sum(1 if weights.shape[1] > 1 else 0, keepdim=True)
