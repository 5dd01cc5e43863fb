"""The sizes of a Llama: presets by name, the planner's, or all of them as `dim=64,num_layers=2,...`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from disttrain.errors import SettingError
from disttrain.plan import PRESETS as SIZES
from disttrain.plan import LlamaSizes, preset_named
from disttrain.plan.command import lacks


@dataclass(frozen=True)
class RotaryScaling:
    """How positions beyond `original_length` are squeezed into it, as Llama 3.1 does: see `model.frequencies`."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes; `hidden_size` is that of the feed-forward layers, `max_length` the longest sequence.

    is_tied      whether embedding and head are one matrix
    num_experts  in the place of each feed-forward layer, of which a token has `top_k`; 0: none
    expert_size  the hidden size of each
    shared_size  of a feed-forward layer beside the experts, which every token goes through; 0: none
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    vocabulary_size: int = 256
    max_length: int = 2048
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    norm_eps: float = 1e-5
    is_tied: bool = False
    num_experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    shared_size: int = 0

    @property
    def head_size(self) -> int:
        return self.dim // self.num_heads


def _config(sizes: LlamaSizes) -> LlamaConfig:
    """Of the planner's sizes; the vocabulary will be the tokenizer's."""
    numbers = (sizes.dim, sizes.num_layers, sizes.num_heads, sizes.num_kv_heads, sizes.ffn_size)
    config = LlamaConfig(*numbers, rotary_base=sizes.rotary_base, is_tied=sizes.is_tied)
    if lacking := lacks(sizes):
        problem = f"{' and '.join(lacking)} of that model are not in this one."
        raise SettingError("train_llama --model", problem, "Take a Llama, and --experts N for experts.")
    if (experts := sizes.experts) is None:
        return config
    found = {"num_experts": experts.num_experts, "top_k": experts.top_k}
    return replace(config, **found, expert_size=experts.ffn_size, shared_size=experts.shared_size)


def with_experts(config: LlamaConfig, num_experts: int, top_k: int, num_shared: int) -> LlamaConfig:
    """The model with experts of a size at which a token's together compute as much as its feed-forward layer did."""
    size = config.hidden_size // top_k
    sizes = {"expert_size": size, "shared_size": num_shared * size}
    return checked(replace(config, num_experts=num_experts, top_k=top_k, **sizes))


PRESETS = {name: _config(sizes) for name, sizes in SIZES.items()}


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


NEEDED = ("dim", "num_layers", "num_heads", "num_kv_heads", "hidden_size")
KINDS = dict.fromkeys(NEEDED, int) | {
    "rotary_base": float,
    "norm_eps": float,
    "is_tied": _truth,
    "num_experts": int,
    "top_k": int,
    "expert_size": int,
    "shared_size": int,
}


def config_named(text: str) -> LlamaConfig:
    """A preset, or one from sizes. Raises SettingError with what would do."""
    if (sizes := preset_named(text)) is not None:
        return _config(sizes)
    given = dict(part.partition("=")[::2] for part in text.split(","))
    unknown, missing = sorted(given.keys() - KINDS.keys()), [name for name in NEEDED if name not in given]
    if unknown or missing:
        problem = f"{text!r} is neither one of {', '.join(PRESETS)}, nor a folder with a config.json, nor sizes"
        problem += f": {', '.join(unknown)} is no size." if "=" in text and unknown else "."
        raise SettingError("train_llama --model", problem, f"Sizes are {', '.join(f'{name}=N' for name in NEEDED)}.")
    try:
        config = LlamaConfig(**{name: KINDS[name](value) for name, value in given.items()})
    except ValueError as error:
        raise SettingError("train_llama --model", f"{text!r}: {error}.", "Give numbers.") from error
    return checked(config)


def checked(config: LlamaConfig) -> LlamaConfig:
    """Raises SettingError where heads do not divide."""
    if min(asdict(config)[name] for name in NEEDED) < 1:
        raise SettingError("train_llama --model", "a size is below 1.", f"Sizes are {', '.join(NEEDED)}.")
    if config.dim % (2 * config.num_heads) or config.num_heads % config.num_kv_heads:
        problem = (
            f"dim {config.dim} has {config.num_heads} heads, of which {config.num_kv_heads} are of keys and values"
        )
        remedy = "Heads need an even number of elements each, and a whole number of them for each of keys and values."
        raise SettingError("train_llama --model", f"{problem}.", remedy)
    if config.num_experts and not (1 <= config.top_k <= config.num_experts and config.expert_size > 0):
        problem = f"{config.num_experts} experts of size {config.expert_size}, of which a token has {config.top_k}."
        raise SettingError("train_llama --model", problem, "Give a size, and a top_k from 1 to the number of experts.")
    return config


def spelled(config: LlamaConfig) -> str:
    """The sizes as `config_named` reads them."""
    known = {field.name: getattr(config, field.name) for field in fields(config)}
    return ",".join(f"{name}={value}" for name, value in known.items() if name in KINDS)
