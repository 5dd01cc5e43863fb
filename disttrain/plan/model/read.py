"""Reads a model's sizes: from our example's configuration, from Hugging Face's config.json, or by name."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from disttrain.errors import SettingError
from disttrain.plan.model.named import PRESETS, mixture_names, preset_named
from disttrain.plan.model.read_experts import SPELLINGS as EXPERT_SPELLINGS
from disttrain.plan.model.read_experts import experts_in, extra_elements_in, latent_in
from disttrain.plan.model.sizes import LlamaSizes

_OPERATION = "plan --model"

_SPELLINGS = {
    "dim": ("dim", "hidden_size"),
    "num_layers": ("num_layers", "num_hidden_layers", "layers", "n_layers"),
    "num_heads": ("num_heads", "num_attention_heads", "heads", "n_heads"),
    "num_kv_heads": ("num_kv_heads", "num_key_value_heads", "kv_heads", "n_kv_heads"),
    "ffn_size": ("ffn_size", "intermediate_size", "ffn_dim", "ffn", "hidden_size"),
    "vocab_size": ("vocab_size", "vocabulary_size", "vocab"),
    "head_size": ("head_size", "head_dim"),
    "is_tied": ("is_tied", "tie_word_embeddings", "tied"),
    "rotary_base": ("rotary_base", "rope_theta"),
}
"""Ours first, then Hugging Face's. Beside `dim`, `hidden_size` is the feed-forward layers'."""
_WEIGHTLESS = {"norm_eps"}
"""The example's, of no interest here."""


def read_sizes(text: str, vocab_size: int | None = None) -> LlamaSizes:
    """A preset; sizes as `dim=64,num_layers=2,...`; or a TOML or JSON file, with them at its top or in a table `model`.

    Args: vocab_size  instead of what is said there: that of a tokenizer.
    Raises: SettingError when there is no such model or file, or what it says is neither a Llama's nor a mixture's.
    """
    if (preset := preset_named(text)) is not None:
        return preset if vocab_size is None else replace(preset, vocab_size=vocab_size)
    table, where = _written_out(text) if "=" in text else _read(text)
    if isinstance(table, str):
        return read_sizes(table, vocab_size)
    return _from_table(table if vocab_size is None else {**table, "vocab_size": vocab_size}, where)


def _written_out(text: str) -> tuple[dict[str, Any], str]:
    table: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _WEIGHTLESS.union(*_SPELLINGS.values(), *EXPERT_SPELLINGS.values()):
            problem = f"{text!r} has {name!r}, which is no size."
            sizes = ", ".join(spellings[0] for spellings in (_SPELLINGS | EXPERT_SPELLINGS).values())
            raise SettingError(_OPERATION, problem, f"Sizes are {sizes}.")
        table[name] = int(value) if value.isdecimal() else {"true": True, "false": False}.get(value.lower(), value)
    return table, repr(text)


def _read(text: str) -> tuple[dict[str, Any] | str, str]:
    """The table of sizes in a file, or what else it calls its model."""
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    try:
        content = path.read_text(encoding="utf-8")
        content_table = tomllib.loads(content) if path.suffix == ".toml" else json.loads(content)
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{text!r} is no preset, and cannot be read: {getattr(error, 'strerror', None) or error}."
        names = ", ".join([*PRESETS, *mixture_names()])
        remedy = f"Give a TOML or JSON file, sizes as dim=N,num_layers=N,..., or one of {names}."
        raise SettingError(_OPERATION, problem, remedy) from None
    except ValueError as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise SettingError(_OPERATION, f"{path} is no {kind}: {error}.", "Mend it.") from None
    table = content_table.get("model", content_table) if isinstance(content_table, dict) else None
    if not isinstance(table, dict | str):
        raise SettingError(_OPERATION, f"{path} has no table of sizes.", "Give dim, num_layers and so on by name.")
    return table, str(path)


def _from_table(table: Mapping[str, Any], where: str) -> LlamaSizes:
    sizes: dict[str, Any] = {}
    for field, spellings in _SPELLINGS.items():
        spelled = [name for name in spellings if table.get(name) is not None]
        # One name can stand for two things: in a table with `dim`, `hidden_size` is no width of the residual stream.
        if field == "ffn_size" and "dim" not in table and spelled[:1] == ["hidden_size"]:
            spelled = []
        if spelled:
            sizes[field] = table[spelled[0]]
    if "rotary_base" in sizes:
        sizes["rotary_base"] = _number(sizes["rotary_base"])
    if "num_kv_heads" not in sizes and "num_heads" in sizes:
        sizes["num_kv_heads"] = sizes["num_heads"]
    missing = [name for name in ("dim", "num_layers", "num_heads", "ffn_size", "vocab_size") if name not in sizes]
    if missing:
        names = ", ".join("/".join(_SPELLINGS[name][:2]) for name in missing)
        raise SettingError(_OPERATION, f"{where} does not say {names}.", "Add it; all sizes of the model are needed.")
    sizes["experts"], sizes["latent"] = experts_in(table, sizes["ffn_size"], where), latent_in(table)
    plain = LlamaSizes(**sizes)
    return replace(plain, extra_elements=extra_elements_in(table, plain.query_size, plain.key_size, plain.num_heads))


def _number(value: object) -> float:
    """`value`, a number or its text, as a float."""
    try:
        return float(str(value))
    except ValueError:
        raise SettingError(_OPERATION, f"rotary_base is {value!r}.", "Give a number above 0.") from None
