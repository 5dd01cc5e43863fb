"""transformers' routers, with their rules of ours."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from disttrain.experts import RouterRule

HIDDEN = 12


class Case(NamedTuple):
    """A router of transformers, by its module, its class and its configuration's, and our rule of it."""

    module: str
    router: str
    config: str
    options: dict[str, Any]
    rule: RouterRule


ROUTERS = {
    "mixtral": Case(
        "mixtral",
        "MixtralTopKRouter",
        "MixtralConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        RouterRule(8, 2),
    ),
    "qwen3_moe": Case(
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        "Qwen3MoeConfig",
        {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False},
        RouterRule(7, 3, renormalize=False),
    ),
    "qwen3_moe all": Case(
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True},
        RouterRule(4, 4),
    ),
    "deepseek_v2": Case(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        "DeepseekV2Config",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
        },
        RouterRule(6, 2, renormalize=False, scale=16.0, num_groups=3, top_groups=2, group_top_scores=1),
    ),
    "deepseek_v3": Case(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        "DeepseekV3Config",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        RouterRule(8, 3, score="sigmoid", scale=2.5, num_groups=4, top_groups=2),
    ),
    "gpt_oss": Case(
        "gpt_oss",
        "GptOssTopKRouter",
        "GptOssConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        RouterRule(5, 2, score="softmax_of_chosen"),
    ),
    "gpt_oss one": Case(
        "gpt_oss",
        "GptOssTopKRouter",
        "GptOssConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 1},
        RouterRule(5, 1, score="softmax_of_chosen"),
    ),
}


def drawn_router(name: str) -> tuple[Any, RouterRule]:
    """transformers' router with drawn weights, and our rule of it."""
    case = ROUTERS[name]
    # Here: transformers takes seconds to load, and all collect the tests.
    modeling = importlib.import_module(f"transformers.models.{case.module}.modeling_{case.module}")
    config = getattr(importlib.import_module("transformers"), case.config)
    theirs = getattr(modeling, case.router)(config(hidden_size=HIDDEN, num_attention_heads=4, **case.options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *theirs.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.1 if tensor.dim() == 1 else 1))
    return theirs, case.rule


def by_expert(weights: torch.Tensor, indices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """(tokens, experts): weights at their experts, so that the order of a token's choices plays no part."""
    return weights.new_zeros(len(weights), num_experts).scatter(1, indices, weights)
