"""Mixtures of experts: routing, expert parallel, and models that have them."""

from __future__ import annotations

from disttrain.experts.routing.balance import Balance, balance_loss, z_loss
from disttrain.experts.routing.bias import update_expert_bias, update_expert_biases
from disttrain.experts.routing.choice import Routing, choose, weights_before_experts
from disttrain.experts.routing.foreign import watch_routers
from disttrain.experts.routing.router import Router
from disttrain.experts.routing.rule import RouterRule
from disttrain.experts.routing.statistics import RouterStatistics, expert_numbers, read_statistics, router_numbers
from disttrain.experts.routing.watch import set_loss_scale

__all__ = [
    "Balance",
    "Router",
    "RouterRule",
    "RouterStatistics",
    "Routing",
    "balance_loss",
    "choose",
    "expert_numbers",
    "read_statistics",
    "router_numbers",
    "set_loss_scale",
    "update_expert_bias",
    "update_expert_biases",
    "watch_routers",
    "weights_before_experts",
    "z_loss",
]
