"""torch's scaled_dot_product_attention by `attention`, where that computes the same."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from disttrain.dtensor import DTensor
from disttrain.errors import ShapeError
from disttrain.kernels.attention.context.current import ENTERED, Cut, current_cut
from disttrain.kernels.attention.operator import attention
from disttrain.kernels.attention.rules import Causal
from disttrain.process_group.watching.refusals import ANY

_TORCHS: Final = F.scaled_dot_product_attention


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention in place of torch's: with a mask in memory, with dropout, and for anything but plain tensors on a GPU,
    torch's own. Where positions are cut over ranks (`context/current.py`), always ours."""
    if ENTERED and (cut := current_cut()) is not None:
        if F.scaled_dot_product_attention is not _TORCHS:
            # A block of context_parallel has put its own there, which knows of documents, too.
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return _of_cut(cut, query, key, value, attn_mask, dropout_p, is_causal, scale)
    if attn_mask is None and dropout_p == 0.0 and _fits(query, key, value, enable_gqa):
        return attention(query, key, value, Causal() if is_causal else None, scale=scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _of_cut(
    cut: Cut,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention of this rank's positions. A mask in memory is refused there, by all ranks alike."""
    if dropout_p != 0.0:
        problem = f"dropout_p is {dropout_p}, and positions are cut over ranks, where no weights are dropped."
        error = ShapeError("attention", problem, "Train without dropout in attention.")
        cut.axis.get_group().refuse("attention", error, ANY)
        raise error
    mask: Any = Causal() if attn_mask is None and is_causal else attn_mask
    return attention(query, key, value, mask, scale=scale)


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, has_groups: bool) -> bool:
    tensors = (query, key, value)
    if not query.is_cuda or any(
        isinstance(tensor, DTensor) or tensor.is_nested or tensor.dim() != 4 for tensor in tensors
    ):
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype is torch.float64:
        return False
    (batch_size, num_heads, _, head_dim), (_, num_kv_heads, num_keys, _) = query.shape, key.shape
    return (
        key.shape == (batch_size, num_kv_heads, num_keys, head_dim)
        and value.shape[:3] == key.shape[:3]
        and (num_heads == num_kv_heads or (has_groups and num_kv_heads > 0 and num_heads % num_kv_heads == 0))
    )
