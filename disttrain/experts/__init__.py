"""Mixtures of experts: routing, expert parallel, and models that have them."""

from __future__ import annotations

from disttrain.experts.clipping import clip_grad_norm_
from disttrain.experts.exchange.dispatch import Dispatched, combine, dispatch
from disttrain.experts.layer import Experts, MixtureOfExperts
from disttrain.experts.models.pretrained import pretrained_state_dict
from disttrain.experts.models.use import Adopted, Left, Taken, use_experts
from disttrain.experts.routing.balance import Balance, balance_loss, z_loss
from disttrain.experts.routing.bias import update_expert_bias, update_expert_biases
from disttrain.experts.routing.choice import Routing, choose, weights_before_experts
from disttrain.experts.routing.foreign import watch_routers
from disttrain.experts.routing.router import Router
from disttrain.experts.routing.rule import RouterRule
from disttrain.experts.routing.statistics import RouterStatistics, expert_numbers, read_statistics, router_numbers
from disttrain.experts.routing.watch import set_loss_scale
from disttrain.experts.scaling import GradScaler
from disttrain.experts.shard import ExpertParallel, shard_experts
from disttrain.experts.tensor_parallel import ExpertTensorParallel

__all__ = [
    "Adopted",
    "Balance",
    "Dispatched",
    "ExpertParallel",
    "ExpertTensorParallel",
    "Experts",
    "GradScaler",
    "Left",
    "MixtureOfExperts",
    "Router",
    "RouterRule",
    "RouterStatistics",
    "Routing",
    "Taken",
    "balance_loss",
    "choose",
    "clip_grad_norm_",
    "combine",
    "dispatch",
    "expert_numbers",
    "pretrained_state_dict",
    "read_statistics",
    "router_numbers",
    "set_loss_scale",
    "shard_experts",
    "update_expert_bias",
    "update_expert_biases",
    "use_experts",
    "watch_routers",
    "weights_before_experts",
    "z_loss",
]
