"""Attention of queries over some keys by products and a softmax, with the sums of weights: for any rule, anywhere.

Scores of a block of queries are in memory at a time. In fp32 or wider.

Backward takes the sums of weights over all keys, as FlashAttention's does: P = exp(s - lse), dS = P (dP - dO . O).
Source: Dao et al., "FlashAttention" (arXiv 2205.14135), appendix B.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from disttrain.kernels.attention.rules import Rule, ScoreIndices, changed, changes_of, seen
from disttrain.kernels.choice import wide_dtype

_SCORES_BYTES: Final = 64 << 20


class Places(NamedTuple):
    """The rule that queries and keys obey, with its tensors on their device, and where they are in the whole."""

    rule: Rule | None
    queries: torch.Tensor
    """(L,) int64, in growing order."""
    keys: torch.Tensor
    """(S,) int64, likewise."""
    scale: float


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention (B, H, L, Ev) over these keys, and the logarithm of the sums of its weights (B, H, L).

    (B, H, L, E), (B, K, S, E), (B, K, S, Ev). A query that sees nothing gets zeros, and -inf.
    """
    wide = wide_dtype(query.dtype)
    out = query.new_empty((*query.shape[:3], value.shape[3]), dtype=wide)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    wide_key, wide_value = key.to(wide), value.to(wide)
    for rows in _blocks(query, key):
        scores = _scores(_products(query[:, :, rows], wide_key, places.scale), places, rows)
        sums = scores.logsumexp(-1)
        weights = (scores - _finite(sums)).exp_()
        out[:, :, rows] = _times(weights, wide_value)
        lse[:, :, rows] = sums
    return out, lse


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    places: Places,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The terms of these keys in the gradients of query, key and value, of attention `out` over all keys; in `wide`."""
    wide, num_kv_heads = wide_dtype(query.dtype), key.shape[1]
    wide_key, wide_value = key.to(wide), value.to(wide)
    dquery = torch.empty_like(query, dtype=wide)
    dkey, dvalue = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
    for rows in _blocks(query, key):
        wide_query, wide_grad_out = query[:, :, rows].to(wide), grad_out[:, :, rows].to(wide)
        delta = (wide_grad_out * out[:, :, rows]).sum(-1, keepdim=True)
        products = _products(wide_query, wide_key, places.scale)
        with torch.enable_grad():
            products = products.detach().requires_grad_(bool(changes_of(places.rule)))
            scores = _scores(products, places, rows)
        weights = (scores.detach() - _finite(lse[:, :, rows])).exp_()
        dscores = weights * (_times(wide_grad_out, wide_value.mT) - delta)
        if products.requires_grad:
            (dscores,) = torch.autograd.grad(scores, products, dscores)
        dscores = dscores * places.scale
        dquery[:, :, rows] = _times(dscores, wide_key)
        dkey += _grouped(dscores, num_kv_heads).mT @ _grouped(wide_query, num_kv_heads)
        dvalue += _grouped(weights, num_kv_heads).mT @ _grouped(wide_grad_out, num_kv_heads)
    return dquery, dkey, dvalue


def _blocks(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Blocks of queries of which the scores take no more than some megabytes."""
    row_bytes = query.shape[0] * query.shape[1] * key.shape[2] * wide_dtype(query.dtype).itemsize
    num_rows = max(1, _SCORES_BYTES // max(1, row_bytes))
    return (slice(start, start + num_rows) for start in range(0, query.shape[2], num_rows))


def _products(query: torch.Tensor, wide_key: torch.Tensor, scale: float) -> torch.Tensor:
    return _times(query.to(wide_key.dtype), wide_key.mT) * scale


def _times(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(B, H, L, A) by (B, K, A, C): (B, H, L, C), each of K serves H / K."""
    grouped = _grouped(left, right.shape[1])
    return (grouped @ right).view(*left.shape[:3], right.shape[3])


def _grouped(tensor: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """(B, H, L, A) as (B, K, H / K * L, A)."""
    batch_size, num_heads, length, width = tensor.shape
    num_rows = num_heads // max(1, num_kv_heads) * length
    return tensor.reshape(batch_size, num_kv_heads, num_rows, width)


def _scores(products: torch.Tensor, places: Places, rows: slice) -> torch.Tensor:
    """Scores of a block, -inf where the key is not seen."""
    device = products.device
    batch, head = (torch.arange(size, device=device) for size in products.shape[:2])
    indices = ScoreIndices(batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), places.queries[rows].view(-1, 1), places.keys)
    scores = changed(places.rule, products, indices)
    is_seen = seen(places.rule, indices)
    return scores if is_seen is None else scores.masked_fill(~is_seen, -torch.inf)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """The number that is taken off scores: of who sees nothing it may be anything but -inf."""
    return lse.unsqueeze(-1).clamp(min=torch.finfo(lse.dtype).min)
