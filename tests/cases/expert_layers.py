"""Layers of experts as transformers writes them, and ours with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from disttrain.experts import Experts
from disttrain.kernels.grouped.form import GatedForm

HIDDEN, INTER = 12, 8


def mixtral(num_experts: int) -> nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

    return MixtralExperts(_config(MixtralConfig, num_local_experts=num_experts, intermediate_size=INTER))


def qwen3_moe(num_experts: int) -> nn.Module:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    return Qwen3MoeExperts(_config(Qwen3MoeConfig, num_experts=num_experts, moe_intermediate_size=INTER))


def deepseek_v3(num_experts: int) -> nn.Module:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3Experts

    return DeepseekV3Experts(_config(DeepseekV3Config, n_routed_experts=num_experts, moe_intermediate_size=INTER))


def gpt_oss(num_experts: int) -> nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    return GptOssExperts(_config(GptOssConfig, num_local_experts=num_experts, intermediate_size=INTER))


JUDGES: dict[str, Callable[[int], nn.Module]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
}


def judge(name: str, num_experts: int) -> nn.Module:
    """transformers' own experts, with random weights in double precision."""
    module = JUDGES[name](num_experts).double()
    generator = torch.Generator().manual_seed(num_experts)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return module


def ours(module: nn.Module) -> Experts:
    """Our layer with copies of the weights of transformers' experts."""
    is_gpt_oss = hasattr(module, "gate_up_proj_bias")
    form = GatedForm()
    if is_gpt_oss:
        form = GatedForm("clamped", is_interleaved=True, is_transposed=True, limit=module.limit, alpha=module.alpha)
    made = Experts(len(module.down_proj), HIDDEN, INTER, form, bias=is_gpt_oss, dtype=torch.float64)
    made.load_state_dict(copy.deepcopy(module.state_dict()))
    return made


def tokens(rank: int, num_tokens: int, k: int, num_experts: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Rows, experts and weights of one rank's tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    weights, indices = scores.topk(k, dim=-1) if num_tokens else (scores.new_zeros(0, k), torch.zeros(0, k).long())
    return x, indices, weights


def _config(kind: type, **sizes: Any) -> Any:
    config = kind(hidden_size=HIDDEN, **sizes)
    config._experts_implementation = "eager"
    return config
