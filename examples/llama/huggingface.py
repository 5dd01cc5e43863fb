"""Weights in the form of Hugging Face's transformers: config.json and safetensors, read and written.

Only names differ. In both, a linear layer's weight is (outputs, inputs), and positions turn pairs (i, i + E / 2) of a
head's elements; in Meta's own files these are neighbours, which transformers' converter has undone.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import disttrain
from disttrain.checkpoint import training_state
from disttrain.checkpoint.interop import load_safetensors, save_safetensors
from disttrain.errors import SettingError
from llama.config import LlamaConfig, RotaryScaling, checked
from llama.model import Llama
from llama.tokenizer import FILE_NAME, Tokenizer

CONFIG = "config.json"
NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
OLDER_WEIGHTS = ("*.bin", "*.pth")
"""Pickles: models had them before there were safetensors."""
OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
INSIDE = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_OURS = {theirs: ours for ours, theirs in {**OUTSIDE, **INSIDE}.items()}
_OUR_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.weight")
_THEIR_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def their_name(ours: str) -> str:
    """`blocks.3.attention.query.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if found := _OUR_BLOCK.fullmatch(ours):
        return f"model.layers.{found[1]}.{INSIDE[found[2]]}.weight"
    return f"{OUTSIDE[ours.removesuffix('.weight')]}.weight"


def our_name(theirs: str) -> str:
    """The other way; names that a Llama has not stay as they are, and the load says so."""
    found = _THEIR_BLOCK.fullmatch(theirs)
    own = _OURS.get(found[2] if found else theirs.removesuffix(".weight"))
    if own is None:
        return theirs
    return f"blocks.{found[1]}.{own}.weight" if found else f"{own}.weight"


def read_config(folder: Path) -> LlamaConfig:
    """The sizes in a config.json. Raises SettingError for a model that is no Llama, or one that we don't have."""
    try:
        theirs = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError("train_llama --model", f"{folder / CONFIG} is no JSON: {error}.", "Mend it.") from error
    heads = theirs.get("num_attention_heads", 0)
    refused = {
        "model_type": theirs.get("model_type") != "llama",
        "hidden_act": theirs.get("hidden_act", "silu") != "silu",
        "attention_bias": theirs.get("attention_bias", False),
        "mlp_bias": theirs.get("mlp_bias", False),
        "head_dim": theirs.get("head_dim") not in (None, theirs.get("hidden_size", 0) // max(heads, 1)),
    }
    for name in (name for name, is_refused in refused.items() if is_refused):
        problem = f"{folder / CONFIG} has {name} {theirs.get(name)!r}, which this Llama has not."
        raise SettingError("train_llama --model", problem, "Take another model.")
    if missing := [name for name in NEEDED if not isinstance(theirs.get(name), int | float)]:
        problem = f"{folder / CONFIG} does not say {', '.join(missing)}."
        raise SettingError("train_llama --model", problem, "Add it, as a number.")
    # Since version 5 both are in `rope_parameters`.
    rotary = theirs.get("rope_parameters") or {
        "rope_theta": theirs.get("rope_theta"),
        **(theirs.get("rope_scaling") or {}),
    }
    config = LlamaConfig(
        dim=theirs["hidden_size"],
        num_layers=theirs["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=theirs.get("num_key_value_heads") or heads,
        hidden_size=theirs["intermediate_size"],
        vocabulary_size=theirs["vocab_size"],
        max_length=theirs["max_position_embeddings"],
        rotary_base=rotary.get("rope_theta") or 10_000.0,
        rotary_scaling=_read_scaling(rotary, folder),
        norm_eps=theirs["rms_norm_eps"],
        is_tied=theirs.get("tie_word_embeddings", False),
    )
    return checked(config)


def has_weights(folder: Path) -> bool:
    """Raises SettingError where there are some that cannot be taken."""
    found = any(folder.glob("*.safetensors"))
    if not found and any(path for pattern in OLDER_WEIGHTS for path in folder.glob(pattern)):
        problem = f"the weights in {folder} are pickles, which are not read."
        raise SettingError("train_llama --model", problem, "Convert them to safetensors, or leave config.json alone.")
    return found


def load_weights(model: Llama, folder: Path) -> None:
    """Fill the parameters that this rank has, on any mesh. Raises CheckpointError. Collective."""
    load_safetensors(training_state(model)["model"], folder, rename=our_name, convert="*")


def save_weights(model: Llama, folder: Path, tokenizer: Tokenizer) -> None:
    """Write what `transformers.AutoModelForCausalLM.from_pretrained` reads, from any mesh. Raises CheckpointError.

    Collective: every rank of the job.
    """
    own = training_state(model)["model"]
    if model.config.is_tied:
        own.pop("head.weight", None)  # they know by the config
    save_safetensors({their_name(name): tensor for name, tensor in own.items()}, folder)
    if not disttrain.is_initialized() or disttrain.get_rank() == 0:
        theirs = {**their_config(model.config), "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
        (folder / CONFIG).write_text(json.dumps(theirs, indent=2) + "\n", encoding="utf-8")
        if tokenizer.path is not None:
            shutil.copyfile(tokenizer.path, folder / FILE_NAME)


def their_config(config: LlamaConfig) -> dict[str, Any]:
    """What stands in config.json."""
    rotary: dict[str, Any] = {"rope_type": "default"}
    if (scaling := config.rotary_scaling) is not None:
        rotary = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.hidden_size,
        "vocab_size": config.vocabulary_size,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.is_tied,
        "hidden_act": "silu",
        "rope_theta": config.rotary_base,
        "rope_scaling": rotary if scaling is not None else None,
        "rope_parameters": {**rotary, "rope_theta": config.rotary_base},
    }


def _read_scaling(rotary: dict[str, Any], folder: Path) -> RotaryScaling | None:
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        problem = f"{folder / CONFIG} scales rotary positions by {kind!r}."
        raise SettingError("train_llama --model", problem, "Those of Llama 3.1 (llama3) are known, and none at all.")
    return RotaryScaling(
        rotary["factor"],
        rotary["low_freq_factor"],
        rotary["high_freq_factor"],
        rotary["original_max_position_embeddings"],
    )
