"""Attention of queries over some keys, of which each query sees a band or all, by kernels that know bands.

| on   | kernel                                | takes                                                           |
| ---- | ------------------------------------- | --------------------------------------------------------------- |
| CPU  | torch's flash attention for CPUs      | all keys, and causal bands of as many keys as queries           |
| CUDA | cuDNN's, through torch                | the same, in 16 bits, from 9.0 on                               |
| CUDA | FlashAttention 2, through torch       | every band, in 16 bits                                          |

Each has a backward that takes result and sums of weights of attention over all keys. Heads of a size that kernels do
not take are padded with zeros.
"""

from __future__ import annotations

from typing import Final

import torch

from disttrain.kernels._torch import (
    cpu_attention_and_sums,
    cpu_attention_backward,
    cudnn_attention_and_sums,
    cudnn_attention_backward,
    flash_attention_and_sums,
    flash_attention_backward,
)
from disttrain.kernels.attention.choice import machine_of
from disttrain.kernels.attention.context.blocks.pieces import ALL, CAUSAL
from disttrain.kernels.attention.layouts import laid_as
from disttrain.kernels.attention.plan import CUDNN, FLASH, Call, serving
from disttrain.kernels.attention.runs import aligned

_CPU: Final = "cpu"
_CPU_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kernel_for(band: tuple[int, int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """The name of the kernel that takes them; empty where none does."""
    if not (query.numel() and key.numel() and value.numel()):
        return ""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if query.device.type != "cuda":
        is_known = band == ALL or (band == CAUSAL and num_keys == num_queries)
        is_fit = query.shape[3] == value.shape[3] and query.dtype in _CPU_DTYPES and query.device.type == "cpu"
        return _CPU if is_known and is_fit else ""
    # cuDNN counts a causal mask from the first key, FlashAttention from the last; where there are as many it is one.
    window = band if band != CAUSAL or num_queries == num_keys else None
    call = Call(
        query.dtype,
        *(query.shape[0], query.shape[1], key.shape[1], num_queries, num_keys, query.shape[3], value.shape[3]),
        window=window,
        has_changes=False,
        needs_grad=True,
    )
    machine = machine_of(query.device.type, query.device.index)
    if CUDNN in serving(machine, call):
        return CUDNN
    # Bands are counted as it counts, so that it takes any; what else it asks for, it asks of all keys too.
    return FLASH if FLASH in serving(machine, call._replace(window=ALL)) else ""


def forward(
    kernel: str, band: tuple[int, int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention (B, H, L, Ev) over these keys, and the logarithm of the sums of its weights (B, H, L).

    (B, H, L, E), (B, K, S, E), (B, K, S, Ev); `kernel` is what `kernel_for` says.
    """
    width = value.shape[3]
    if kernel == _CPU:
        key, value = (_for_each_head(tensor, query.shape[1]) for tensor in (key, value))
        return cpu_attention_and_sums(query, key, value, band == CAUSAL, scale)
    query, key, value = (aligned(tensor) for tensor in (query, key, value))
    if kernel == CUDNN:
        out, lse = cudnn_attention_and_sums(query, key, value, band == CAUSAL, scale)
    else:
        out, lse = flash_attention_and_sums(query, key, value, band, scale)
        if band != ALL:
            # Of who sees nothing it says inf.
            lse = torch.where(lse == torch.inf, -torch.inf, lse)
    return out[..., :width], lse


def backward(
    kernel: str,
    band: tuple[int, int],
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> Tensors:
    """The terms of these keys in the gradients of query, key and value, of attention `out` over all keys."""
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    # As the kernels say of who sees nothing: all weights become exp(-inf).
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    if kernel == _CPU:
        key, value = (_for_each_head(tensor, num_heads) for tensor in (key, value))
        dquery, dkey, dvalue = cpu_attention_backward(grad_out, query, key, value, out, lse, band == CAUSAL, scale)
        return dquery, _of_groups(dkey, num_kv_heads), _of_groups(dvalue, num_kv_heads)
    sizes = (query.shape[3], key.shape[3], value.shape[3])
    grad_out, query, key, value, out = (aligned(tensor) for tensor in (grad_out, query, key, value, out))
    if kernel == CUDNN:
        query = query.contiguous() if 0 in query.stride() else query
        grad_out, out = laid_as(query, grad_out, out)
        grads = cudnn_attention_backward(grad_out, query, key, value, out, lse, band == CAUSAL, scale)
    else:
        grads = flash_attention_backward(grad_out, query, key, value, out, lse.contiguous(), band, scale)
    dquery, dkey, dvalue = (grad[..., :size] for grad, size in zip(grads, sizes, strict=True))
    return dquery, dkey, dvalue


def _for_each_head(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    times = num_heads // tensor.shape[1]
    return tensor.repeat_interleave(times, 1) if times > 1 else tensor


def _of_groups(grad: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The sum of the gradients of each group of heads."""
    if grad.shape[1] == num_kv_heads:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    result: torch.Tensor = grad.unflatten(1, (num_kv_heads, -1)).sum(2, dtype=wide)
    return result
