"""Small models of transformers with experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {**_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "router_jitter_noise": 0.1},
    "Qwen2Moe": {**_SIZES, **_MOE, "num_experts": 5, "shared_expert_intermediate_size": 8},
    "Qwen3Moe": {**_SIZES, **_MOE, "num_experts": 5},
    "DeepseekV3": {**_SIZES, **_MOE, **_LATENT, "n_routed_experts": 6, "num_experts_per_tok": 2},
    "GptOss": {**_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "Olmoe": {**_SIZES, "num_experts": 5, "num_experts_per_tok": 2},
    "Glm4Moe": {
        **_SIZES,
        **_MOE,
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "Phimoe": {**_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2},
    "GraniteMoe": {**_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2},
    "Jamba": {
        **_SIZES,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "Dbrx": {
        "d_model": 16,
        "n_heads": 2,
        "n_layers": 2,
        "max_seq_len": 32,
        "vocab_size": 32,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 6, "moe_top_k": 2, "hidden_size": 16},
        "pad_token_id": 0,
        "attn_implementation": "eager",
    },
    "Llama4Text": {
        **_SIZES,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 12,
        "layer_types": ["full_attention"] * 2,
    },
}
"""By the class's name without ForCausalLM, what its config is made of."""


def made(name: str) -> nn.Module:
    """The causal model of that name in fp64, with weights large enough for experts to differ."""
    import transformers  # here, since it takes seconds and few tests need it

    kind = name.removesuffix("Text")
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # torch's grouped products know no fp64
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" not in path:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model
