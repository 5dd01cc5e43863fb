"""Layers of experts as transformers writes them, and ours with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from disttrain.experts import Experts, MixtureOfExperts
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
    return _drawn(JUDGES[name](num_experts), num_experts)


def _drawn(module: nn.Module, num_experts: int) -> nn.Module:
    module = module.double()
    generator = torch.Generator().manual_seed(num_experts)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return module


def block(name: str, num_experts: int, k: int) -> nn.Module:
    """transformers' own block of a router and experts, with random weights in double precision."""
    if name == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

        sizes = {"num_local_experts": num_experts, "intermediate_size": INTER}
        module = MixtralSparseMoeBlock(_config(MixtralConfig, num_experts_per_tok=k, **sizes))
    elif name == "qwen3_moe":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

        sizes = {"num_experts": num_experts, "moe_intermediate_size": INTER}
        module = Qwen3MoeSparseMoeBlock(_config(Qwen3MoeConfig, num_experts_per_tok=k, norm_topk_prob=True, **sizes))
    elif name == "deepseek_v3":
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

        sizes = {"n_routed_experts": num_experts, "moe_intermediate_size": INTER, "n_group": 1, "topk_group": 1}
        module = DeepseekV3MoE(_config(DeepseekV3Config, num_experts_per_tok=k, **sizes))
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssMLP

        sizes = {"num_local_experts": num_experts, "intermediate_size": INTER}
        module = GptOssMLP(_config(GptOssConfig, num_experts_per_tok=k, **sizes))
    return _drawn(module, num_experts)


def our_block(module: nn.Module) -> MixtureOfExperts:
    """Our layer with the router and the shared experts of transformers' block, and the weights of its experts."""
    copied = copy.deepcopy(module)
    router = copied.router if hasattr(copied, "router") else copied.gate
    return MixtureOfExperts(router, ours(module.experts), getattr(copied, "shared_experts", None))


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
    return kind(hidden_size=HIDDEN, experts_implementation="eager", **sizes)
