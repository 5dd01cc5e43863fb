"""Rules of attention for tests, each with what it sees written out anew, place by place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttrain.kernels import Alibi, Causal, Documents, Prefix, SlidingWindow, SoftCap
from tests.cases.kernels import drawn

NAMES = ["none", "causal", "window", "one-sided", "documents", "causal documents", "prefix", "cap", "alibi", "all"]


def rule_called(name: str, batch_size: int, num_heads: int, length: int) -> Any:
    """With tensors for these sizes."""
    ids = (torch.arange(length) * 5 // max(1, length)).expand(batch_size, -1).contiguous()
    ids[:1] = ids[:1] * 3 // 4
    lengths = torch.arange(batch_size) * 40 + 7
    slopes = 0.5 ** torch.arange(1, num_heads + 1)
    rules: dict[str, Any] = {
        "none": None,
        "causal": Causal(),
        "window": SlidingWindow(17),
        "one-sided": Causal() & SlidingWindow(150),
        "documents": Documents(ids[0]),
        "causal documents": Causal() & Documents(ids),
        "prefix": Prefix(lengths),
        "cap": SoftCap(0.7),
        "alibi": Causal() & Alibi(slopes),
        "all": Prefix(lengths) & Documents(ids) & SlidingWindow(140) & SoftCap(2.0) & Alibi(slopes),
    }
    return rules[name]


def on(rule: Any, device: str) -> Any:
    """The same rule with its tensors there."""
    if rule is None or device == "cpu":
        return rule
    parts = getattr(rule, "parts", (rule,))
    moved = [
        type(part)(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in vars(part).values())) for part in parts
    ]
    result = moved[0]
    for part in moved[1:]:
        result = result & part
    return result


def wished(rule: Any, scale: float | None = None) -> Callable[..., torch.Tensor]:
    """Attention by `rule` over all pairs of places, of heads that are repeated."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        i = torch.arange(query.shape[2], device=query.device)[:, None]
        j = torch.arange(key.shape[2], device=query.device)[None]
        is_seen = torch.ones_like(scores, dtype=torch.bool)
        for part in [] if rule is None else getattr(rule, "parts", (rule,)):
            match part:
                case Causal():
                    is_seen &= j <= i
                case SlidingWindow():
                    is_seen &= (i - j).abs() < part.size
                case Documents():
                    ids = part.ids.expand(len(query), -1)
                    is_seen &= (ids[:, :, None] == ids[:, None])[:, None]
                case Prefix():
                    is_seen &= (j <= i) | (j < part.lengths[:, None, None, None])
                case SoftCap():
                    scores = part.cap * (scores / part.cap).tanh()
                case Alibi():
                    scores = scores - part.slopes[:, None, None] * (i - j).abs()
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        return weights.masked_fill(~is_seen, 0.0) @ value

    return attend


def tensors(
    batch_size: int, heads: tuple[int, int], length: int, head_dim: int, *, num_keys: int | None = None
) -> list[torch.Tensor]:
    """Query, key and value in fp64."""
    num_keys = length if num_keys is None else num_keys
    return [
        drawn(batch_size, number, size, head_dim, seed=seed)
        for seed, (number, size) in enumerate([(heads[0], length), (heads[1], num_keys), (heads[1], num_keys)])
    ]
