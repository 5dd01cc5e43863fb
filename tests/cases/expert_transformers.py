"""Small models of transformers with experts, and the same with our layers of experts in the place of theirs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from disttrain.experts import Experts
from disttrain.kernels.grouped.form import GatedForm

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}


def expert_model(name: str, num_experts: int, **sizes: Any) -> nn.Module:
    """transformers' own, with random weights in double precision, the same on every rank."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {**SIZES, **sizes}
    model: nn.Module
    if name == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, num_local_experts=num_experts))
    elif name == "qwen3_moe":
        options = {"num_experts": num_experts, "moe_intermediate_size": 8, "norm_topk_prob": True}
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, **options))
    else:
        ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
        groups = {"n_group": 2 if num_experts % 2 == 0 else 1, "topk_group": 1, "n_shared_experts": 1}
        config = hf.DeepseekV3Config(
            **{**sizes, "head_dim": 4},
            **ranks,
            **groups,
            n_routed_experts=num_experts,
            moe_intermediate_size=8,
            first_k_dense_replace=1,
        )
        model = hf.DeepseekV3ForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.config._experts_implementation = "eager"
    return model.double()


def with_our_experts(model: nn.Module) -> nn.Module:
    """The model with our layers, in place."""
    for block in list(model.modules()):
        theirs = getattr(block, "experts", None)
        if isinstance(theirs, nn.Module) and hasattr(theirs, "gate_up_proj"):
            num_experts, width, dim = theirs.gate_up_proj.shape
            made = Experts(num_experts, dim, width // 2, GatedForm(), dtype=theirs.gate_up_proj.dtype)
            made.load_state_dict(theirs.state_dict())
            block.experts = made
    return model


def sentences(step: int, num: int = 8, length: int = 6) -> torch.Tensor:
    """The tokens of a step, (num, length)."""
    return torch.randint(0, SIZES["vocab_size"], (num, length), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each next token."""
    return loss_of_logits(model(tokens, use_cache=False).logits, tokens)


def loss_of_logits(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
