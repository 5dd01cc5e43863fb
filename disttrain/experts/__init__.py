"""Mixtures of experts: routing, expert parallel, and models that have them."""

from __future__ import annotations

from disttrain.experts.exchange.dispatch import Dispatched, combine, dispatch
from disttrain.experts.layer import Experts, MixtureOfExperts
from disttrain.experts.shard import ExpertParallel, shard_experts

__all__ = [
    "Dispatched",
    "ExpertParallel",
    "Experts",
    "MixtureOfExperts",
    "combine",
    "dispatch",
    "shard_experts",
]
