"""Mixtures of experts: routing, expert parallel, and models that have them."""

from __future__ import annotations

from disttrain.experts.routing.balance import Balance, balance_loss, z_loss
from disttrain.experts.routing.bias import update_expert_bias, update_expert_biases
from disttrain.experts.routing.choice import Routing, choose
from disttrain.experts.routing.counters import RouterCounters
from disttrain.experts.routing.router import Router, set_loss_scale
from disttrain.experts.routing.rule import RouterRule
from disttrain.experts.routing.statistics import RouterStatistics, expert_numbers, read_statistics, router_numbers

__all__ = [
    "Balance",
    "Router",
    "RouterCounters",
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
    "z_loss",
]
