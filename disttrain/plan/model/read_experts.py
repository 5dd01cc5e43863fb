"""Reads a mixture of experts, and latent attention, out of a table of sizes: ours, or Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disttrain.errors import SettingError
from disttrain.plan.model.experts import ExpertSizes, LatentAttention

_OPERATION = "plan --model"

SPELLINGS = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "experts"),
    "top_k": ("top_k", "num_experts_per_tok", "experts_per_token"),
    "expert_size": ("expert_size", "moe_intermediate_size"),
    "shared_size": ("shared_size", "shared_expert_intermediate_size"),
    "num_dense": ("num_dense", "first_k_dense_replace"),
    "num_groups": ("num_groups", "n_group"),
    "most_groups": ("most_groups", "topk_group"),
}
"""Ours first, then Hugging Face's."""
_LATENT = {
    "key_rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "plain_size": "qk_nope_head_dim",
    "rotary_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
}


def _value(table: Mapping[str, Any], name: str) -> Any:
    return next((table[spelling] for spelling in SPELLINGS[name] if table.get(spelling) is not None), None)


def experts_in(table: Mapping[str, Any], ffn_size: int, where: str) -> ExpertSizes | None:
    """The experts that a table tells of; None: none.

    Args: ffn_size  of an expert, where the table has one size for all.
    Raises: SettingError where blocks with and without experts take turns, or the table does not say how many a token
            has.
    """
    if not (num_experts := _value(table, "num_experts")):
        if name := next((name for name in table if "expert" in name and table[name]), None):
            problem = f"{where} has {name} {table[name]!r}, and no number of experts."
            raise SettingError(_OPERATION, problem, f"Say it: {SPELLINGS['num_experts'][0]}=N.")
        return None
    if (table.get("decoder_sparse_step") or 1) != 1 or table.get("mlp_only_layers"):
        problem = f"{where} has blocks with and without experts in turn."
        raise SettingError(_OPERATION, problem, "Take a model that has experts in all blocks but the first ones.")
    if (top_k := _value(table, "top_k")) is None:
        problem = f"{where} does not say how many of {num_experts} experts a token has."
        raise SettingError(_OPERATION, problem, f"Say it: {SPELLINGS['top_k'][0]}=N.")
    expert_size = _value(table, "expert_size") or ffn_size
    shared_size = _value(table, "shared_size") or (table.get("n_shared_experts") or 0) * expert_size
    return ExpertSizes(
        num_experts,
        top_k,
        expert_size,
        shared_size=shared_size,
        num_dense=_value(table, "num_dense") or 0,
        num_groups=_value(table, "num_groups") or 1,
        most_groups=_value(table, "most_groups") or 1,
        has_bias=table.get("model_type") == "gpt_oss",
        has_balance_bias=table.get("model_type") == "deepseek_v3",
    )


def latent_in(table: Mapping[str, Any]) -> LatentAttention | None:
    """The latent attention that a table tells of; None: none."""
    if table.get("kv_lora_rank") is None:
        return None
    return LatentAttention(**{name: table.get(spelling) or 0 for name, spelling in _LATENT.items()})


def extra_elements_in(table: Mapping[str, Any], query_size: int, key_size: int, num_heads: int) -> int:
    """Gains of heads in Qwen3; biases of attention and sinks in gpt-oss."""
    kind = str(table.get("model_type"))
    if kind.startswith("qwen3"):
        return 2 * query_size // num_heads
    if kind == "gpt_oss":
        return query_size + 2 * key_size + int(table["hidden_size"]) + num_heads
    return 0
