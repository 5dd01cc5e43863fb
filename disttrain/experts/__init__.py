"""Mixtures of experts: routing, expert parallel, and models that have them."""

from __future__ import annotations

from disttrain.experts.exchange.dispatch import Dispatched, combine, dispatch
from disttrain.experts.layer import Experts, MixtureOfExperts
from disttrain.experts.models.pretrained import pretrained_state_dict
from disttrain.experts.models.use import Adopted, Left, Taken, use_experts
from disttrain.experts.shard import ExpertParallel, shard_experts
from disttrain.experts.tensor_parallel import ExpertTensorParallel

__all__ = [
    "Adopted",
    "Dispatched",
    "ExpertParallel",
    "ExpertTensorParallel",
    "Experts",
    "Left",
    "MixtureOfExperts",
    "Taken",
    "combine",
    "dispatch",
    "pretrained_state_dict",
    "shard_experts",
    "use_experts",
]
