"""Sizes of a Llama: from our example's configuration, from Hugging Face's config.json, or by name."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disttrain.errors import SettingError

_OPERATION = "plan --model"


@dataclass(frozen=True)
class LlamaSizes:
    """Grouped-query attention and a gated MLP, without biases.

    Args: is_tied  embedding and head are one matrix;  head_size  elements of a head; None: dim / num_heads;
          rotary_base  takes neither time nor memory.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    head_size: int | None = None
    is_tied: bool = False
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        numbers = ["dim", "num_layers", "num_heads", "num_kv_heads", "ffn_size", "vocab_size"]
        for name in numbers + ["head_size"] * (self.head_size is not None):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SettingError(_OPERATION, f"{name} is {value!r}.", "Give a whole number from 1 on.")
        if not isinstance(self.is_tied, bool):
            raise SettingError(_OPERATION, f"is_tied is {self.is_tied!r}.", "Give true or false.")
        if not 0 < self.rotary_base < math.inf:
            raise SettingError(_OPERATION, f"rotary_base is {self.rotary_base!r}.", "Give a number above 0.")
        if self.head_size is None:
            if self.dim % self.num_heads:
                problem = f"dim {self.dim} does not divide among {self.num_heads} heads."
                raise SettingError(_OPERATION, problem, "Say head_dim.")
            object.__setattr__(self, "head_size", self.dim // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            problem = f"{self.num_heads} heads cannot share {self.num_kv_heads} heads of keys and values evenly."
            raise SettingError(_OPERATION, problem, "Give a divisor.")

    @property
    def spelled(self) -> str:
        """As the example reads them; the vocabulary is its tokenizer's."""
        sizes: dict[str, object] = {
            "dim": self.dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "hidden_size": self.ffn_size,
        }
        if self.rotary_base != LlamaSizes.rotary_base:
            sizes["rotary_base"] = f"{self.rotary_base:g}"
        return ",".join(f"{name}={value}" for name, value in sizes.items()) + ",is_tied=True" * self.is_tied

    @property
    def query_size(self) -> int:
        """Elements of all queries of a token."""
        assert self.head_size is not None
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Elements of all keys of a token, and of all values."""
        assert self.head_size is not None
        return self.num_kv_heads * self.head_size

    @property
    def block_matrix_elements(self) -> int:
        """All matrices of a block, but for norms."""
        return self.dim * (2 * self.query_size + 2 * self.key_size + 3 * self.ffn_size)

    @property
    def vocab_elements(self) -> int:
        """The embedding, or the head."""
        return self.vocab_size * self.dim

    @property
    def num_parameters(self) -> int:
        tables = self.vocab_elements * (1 if self.is_tied else 2)
        return self.num_layers * (self.block_matrix_elements + 2 * self.dim) + tables + self.dim

    def flops(self, num_tokens: int, seq_size: int) -> float:
        """Counts the FLOPs of a step: 6 per token and element of each matrix but the embedding, and the causal half of
        attention; nothing that is computed twice."""
        matrices = self.num_layers * self.block_matrix_elements + self.vocab_elements
        return num_tokens * (6.0 * matrices + 6.0 * self.num_layers * seq_size * self.query_size)


BYTES = 256
"""The vocabulary of a model that reads bytes."""

PRESETS = {
    "tiny": LlamaSizes(32, 2, 4, 2, 96, BYTES),
    "small": LlamaSizes(128, 4, 4, 1, 352, BYTES),
    "base": LlamaSizes(768, 12, 12, 4, 2048, BYTES),
    "1b": LlamaSizes(2048, 16, 32, 8, 8192, 128256, is_tied=True, rotary_base=5e5),
    "3b": LlamaSizes(3072, 28, 24, 8, 8192, 128256, is_tied=True, rotary_base=5e5),
    "7b": LlamaSizes(4096, 32, 32, 32, 11008, 32000),
    "8b": LlamaSizes(4096, 32, 32, 8, 14336, 128256, rotary_base=5e5),
    "13b": LlamaSizes(5120, 40, 40, 40, 13824, 32000),
    "70b": LlamaSizes(8192, 80, 64, 8, 28672, 128256, rotary_base=5e5),
    "405b": LlamaSizes(16384, 126, 128, 8, 53248, 128256, rotary_base=5e5),
}
"""Sizes by name: our example's own, Llama 2's (7b, 13b), 3.1's (8b, 70b, 405b) and 3.2's (1b, 3b). Sources: "Llama 2"
(arXiv:2307.09288), "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3, and each config.json."""

_OTHERS = {
    "llama-30b": LlamaSizes(6656, 60, 52, 52, 17920, 32000),
    "llama-65b": LlamaSizes(8192, 80, 64, 64, 22016, 32000),
    "llama-2-70b": LlamaSizes(8192, 80, 64, 8, 28672, 32000),
    **dict.fromkeys(("mistral-7b", "mistral-7b-v0.3"), LlamaSizes(4096, 32, 32, 8, 14336, 32768, rotary_base=1e6)),
    "tinyllama-1.1b": LlamaSizes(2048, 22, 32, 4, 5632, 32000),
}
"""Less often asked for, by their whole names. Sources: "LLaMA" (arXiv:2302.13971), table 2, and each config.json
(Mistral's of version 0.3, which has no sliding window)."""
_FAMILIES = {
    "llama": ("7b", "13b"),
    "llama-2": ("7b", "13b"),
    "llama-3": ("8b", "70b"),
    "llama-3.1": ("8b", "70b", "405b"),
    "llama-3.2": ("1b", "3b"),
    "llama-3.3": ("70b",),
}
_WHOLE_NAMES = {f"{family}-{size}": PRESETS[size] for family, sizes in _FAMILIES.items() for size in sizes}
_NOT_OF_SIZE = re.compile(r"-(instruct|chat|base|hf|v1\.0)(?=-|$)")
"""In a model's name: what its weights were trained for, and in which form they are."""

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


def preset_named(text: str) -> LlamaSizes | None:
    """The preset of this name, if it is one: `7b`, or as others write it, `Llama-2-7B` or `meta-llama/Llama-2-7b-hf`.

    A folder of the name comes first.
    """
    if "/" in text and Path(text).exists():
        return None
    name = _NOT_OF_SIZE.sub("", text.lower().rpartition("/")[2])
    name = re.sub(r"^(?:meta-)?llama-?(?=\d[\d.]*-)", "llama-", name)
    return PRESETS.get(name) or _WHOLE_NAMES.get(name) or _OTHERS.get(name)


def read_sizes(text: str, vocab_size: int | None = None) -> LlamaSizes:
    """A preset; sizes as `dim=64,num_layers=2,...`; or a TOML or JSON file, with them at its top or in a table `model`.

    Args: vocab_size  instead of what is said there: that of a tokenizer.
    Raises: SettingError when there is no such model or file, or what it says is no Llama's.
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
        if name not in _WEIGHTLESS.union(*_SPELLINGS.values()):
            problem = f"{text!r} has {name!r}, which is no size."
            raise SettingError(
                _OPERATION, problem, f"Sizes are {', '.join(spellings[0] for spellings in _SPELLINGS.values())}."
            )
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
        remedy = f"Give a TOML or JSON file, sizes as dim=N,num_layers=N,..., or one of {', '.join(PRESETS)}."
        raise SettingError(_OPERATION, problem, remedy) from None
    except ValueError as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise SettingError(_OPERATION, f"{path} is no {kind}: {error}.", "Mend it.") from None
    table = content_table.get("model", content_table) if isinstance(content_table, dict) else None
    if not isinstance(table, dict | str):
        raise SettingError(_OPERATION, f"{path} has no table of sizes.", "Give dim, num_layers and so on by name.")
    return table, str(path)


def _from_table(table: Mapping[str, Any], where: str) -> LlamaSizes:
    if experts := next((name for name in table if "experts" in name), None):
        problem = f"{where} has {experts} {table[experts]!r}: its blocks are not a Llama's."
        raise SettingError(_OPERATION, problem, "Take a model without experts.")
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
    return LlamaSizes(**sizes)


def _number(value: object) -> float:
    """`value`, a number or its text, as a float."""
    try:
        return float(str(value))
    except ValueError:
        raise SettingError(_OPERATION, f"rotary_base is {value!r}.", "Give a number above 0.") from None
