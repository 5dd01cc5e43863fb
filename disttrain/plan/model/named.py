"""Models by name: their sizes, from each one's report or public config.json."""

from __future__ import annotations

import re
from pathlib import Path

from disttrain.plan.model.experts import ExpertSizes, LatentAttention
from disttrain.plan.model.sizes import LlamaSizes

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


def _qwen3(dim: int, num_layers: int, num_heads: int, ffn_size: int, expert_size: int) -> LlamaSizes:
    """128 experts, 8 for each token, with norms of each head's queries and keys."""
    return LlamaSizes(
        dim,
        num_layers,
        num_heads,
        4,
        ffn_size,
        151_936,
        head_size=128,
        rotary_base=1e6,
        extra_elements=256,
        experts=ExpertSizes(num_experts=128, top_k=8, ffn_size=expert_size),
    )


_GPT_OSS_EXTRA = 64 * 64 + 2 * 8 * 64 + 2880 + 64
"""Biases of attention's four layers, and a sink for each head."""
_MIXTURES = {
    "mixtral-8x7b": LlamaSizes(
        4096, 32, 32, 8, 14336, 32000, rotary_base=1e6, experts=ExpertSizes(num_experts=8, top_k=2, ffn_size=14336)
    ),
    "mixtral-8x22b": LlamaSizes(
        6144, 56, 48, 8, 16384, 32000, rotary_base=1e6, experts=ExpertSizes(num_experts=8, top_k=2, ffn_size=16384)
    ),
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3(4096, 94, 64, 12_288, 1536),
    "deepseek-v2-lite": LlamaSizes(
        2048,
        27,
        16,
        16,
        10_944,
        102_400,
        latent=LatentAttention(query_rank=0, key_rank=512, plain_size=128, rotary_size=64, value_size=128),
        experts=ExpertSizes(num_experts=64, top_k=6, ffn_size=1408, shared_size=2 * 1408, num_dense=1),
    ),
    "deepseek-v3": LlamaSizes(
        7168,
        61,
        128,
        128,
        18_432,
        129_280,
        latent=LatentAttention(query_rank=1536, key_rank=512, plain_size=128, rotary_size=64, value_size=128),
        experts=ExpertSizes(
            num_experts=256,
            top_k=8,
            ffn_size=2048,
            shared_size=2048,
            num_dense=3,
            num_groups=8,
            most_groups=4,
            has_balance_bias=True,
        ),
    ),
    "gpt-oss-20b": LlamaSizes(
        2880,
        24,
        64,
        8,
        2880,
        201_088,
        head_size=64,
        rotary_base=1.5e5,
        extra_elements=_GPT_OSS_EXTRA,
        experts=ExpertSizes(num_experts=32, top_k=4, ffn_size=2880, has_bias=True),
    ),
    "gpt-oss-120b": LlamaSizes(
        2880,
        36,
        64,
        8,
        2880,
        201_088,
        head_size=64,
        rotary_base=1.5e5,
        extra_elements=_GPT_OSS_EXTRA,
        experts=ExpertSizes(num_experts=128, top_k=4, ffn_size=2880, has_bias=True),
    ),
}
"""Mixtures of experts. Sources: "Mixtral of Experts" (arXiv:2401.04088), "Qwen3 Technical Report" (arXiv:2505.09388),
"DeepSeek-V2" (arXiv:2405.04434), "DeepSeek-V3 Technical Report" (arXiv:2412.19437; without its module for a second
token), "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925; every other layer's attention has a window there, and
is counted whole here), and each config.json."""
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
_VERSION = re.compile(r"-(v0\.1|\d{4}|thinking)(?=-|$)")
"""In a mixture's name: its version."""


def mixture_names() -> list[str]:
    """The mixtures of experts that `preset_named` knows."""
    return list(_MIXTURES)


def preset_named(text: str) -> LlamaSizes | None:
    """The preset of this name, if it is one: `7b`, or as others write it, `Llama-2-7B` or `meta-llama/Llama-2-7b-hf`.

    A folder of the name comes first.
    """
    if "/" in text and Path(text).exists():
        return None
    name = _NOT_OF_SIZE.sub("", text.lower().rpartition("/")[2])
    name = re.sub(r"^(?:meta-)?llama-?(?=\d[\d.]*-)", "llama-", name)
    mixture = _VERSION.sub("", name)
    return PRESETS.get(name) or _WHOLE_NAMES.get(name) or _OTHERS.get(name) or _MIXTURES.get(mixture)
