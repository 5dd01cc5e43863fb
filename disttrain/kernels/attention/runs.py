"""Calls each implementation of attention: with its layout, alignment, heads and head sizes.

All take query (B, H, L, E), key (B, K, S, E), value (B, K, S, Ev), with H a multiple of K, a rule and a scale (None:
1 / sqrt(E)), and give (B, H, L, Ev).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Final, cast

import torch
import torch.nn.functional as F

from disttrain.dtensor._torch import as_one_call
from disttrain.kernels._torch import cudnn_attention, efficient_attention, flash_attention, without_modes
from disttrain.kernels.attention.context.current import ENTERED
from disttrain.kernels.attention.flex import flex
from disttrain.kernels.attention.layouts import with_laid_gradient
from disttrain.kernels.attention.plan import CUDNN, DENSE, EFFICIENT, FLASH, FLEX, SDPA
from disttrain.kernels.attention.rules import Rule, ScoreIndices, changed, masks_of, seen, window_of
from disttrain.kernels.choice import wide_dtype

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rule | None, float | None], torch.Tensor]

_TORCHS: Final = F.scaled_dot_product_attention
_ALIGNMENT: Final = 8
"""Kernels read so many elements of 16 bits at once."""


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule | None, scale: float | None
) -> torch.Tensor:
    """Attention by products and a softmax, in fp32 or wider. It judges the others."""
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    wide = wide_dtype(query.dtype)
    grouped = query.to(wide).unflatten(1, (num_kv_heads, num_heads // max(1, num_kv_heads)))
    scores = (grouped @ key.to(wide).unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale_of(query, scale)
    indices = indices_of(scores.shape, scores.device)
    scores = changed(rule, scores, indices)
    is_seen = seen(rule, indices)
    if is_seen is not None:
        scores = scores.masked_fill(~is_seen, -math.inf)
        # A query that sees nothing has no highest score.
        highest = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores
        weights = (scores - highest.clamp(min=torch.finfo(wide).min)).exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
    else:
        weights = scores.softmax(-1)
    result: torch.Tensor = weights.unflatten(1, grouped.shape[1:3]) @ value.to(wide).unsqueeze(2)
    return result.flatten(1, 2).to(query.dtype)


def indices_of(shape: Sequence[int], device: torch.device) -> ScoreIndices:
    """The indices of all scores, (B, H, L, S)."""
    batch, head, query, key = (
        torch.arange(size, device=device).view([-1] + [1] * (3 - dim)) for dim, size in enumerate(shape)
    )
    return ScoreIndices(batch, head, query, key)


def scale_of(query: torch.Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule | None, scale: float | None
) -> torch.Tensor:
    """torch's own choice, with a mask in memory where it is more than causal."""
    is_causal = window_of(rule) == (-1, 0)
    is_seen = None
    if masks_of(rule) and not is_causal:
        is_seen = seen(rule, indices_of((*query.shape[:3], key.shape[2]), query.device))
    # Where a model's calls of torch's function become calls of `attention`, this one is none of them.
    with without_modes() if ENTERED else nullcontext():
        return _TORCHS(
            query, key, value, attn_mask=is_seen, is_causal=is_causal, scale=scale, **option_of_groups(query, key)
        )


def option_of_groups(query: torch.Tensor, key: torch.Tensor) -> dict[str, bool]:
    """torch's name for heads of keys that serve several of queries. Within a graph it takes no symbol for it."""
    return {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}


def _cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule | None, scale: float | None
) -> torch.Tensor:
    inputs = _aligned(query, key, value)
    is_causal = window_of(rule) == (-1, 0)
    result = cudnn_attention(*inputs, is_causal, _needs_grad(*inputs), scale_of(query, scale))
    return with_laid_gradient(result)[..., : value.shape[-1]]


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule | None, scale: float | None
) -> torch.Tensor:
    window = cast(tuple[int, int], window_of(rule))
    inputs = _aligned(query, key, value)
    return flash_attention(*inputs, window, scale_of(query, scale))[..., : value.shape[-1]]


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule | None, scale: float | None
) -> torch.Tensor:
    """Attention by xformers' kernel. It knows no groups of heads: those of keys and values are repeated."""
    inputs = _aligned(query, key, value)
    times = query.shape[1] // key.shape[1]
    if times > 1:
        inputs = (inputs[0], inputs[1].repeat_interleave(times, 1), inputs[2].repeat_interleave(times, 1))
    is_causal = window_of(rule) == (-1, 0)
    return efficient_attention(*inputs, is_causal, _needs_grad(*inputs), scale_of(query, scale))[..., : value.shape[-1]]


def _needs_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _aligned(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads heads with zeros to a multiple of 8 elements, each tensor in one piece that begins at 16 bytes."""
    return aligned(query), aligned(key), aligned(value)


@as_one_call
def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """One call in a graph, as Dynamo does not tell where in memory a tensor begins."""
    rest = tensor.shape[-1] % _ALIGNMENT
    if rest:
        return F.pad(tensor, (0, _ALIGNMENT - rest))
    *strides, last = tensor.stride()
    is_misplaced = tensor.storage_offset() % _ALIGNMENT or any(stride % _ALIGNMENT for stride in strides)
    return tensor.contiguous() if last != 1 or is_misplaced else tensor


RUNS: Final[dict[str, Run]] = {
    CUDNN: _cudnn,
    FLASH: _flash,
    EFFICIENT: _efficient,
    FLEX: flex,
    SDPA: _sdpa,
    DENSE: dense,
}
