"""Lists the implementations of attention that can serve a call, best first where nothing has been measured. Pure.

| name      | is                                    | takes                                                            |
| --------- | ------------------------------------- | ---------------------------------------------------------------- |
| cudnn     | cuDNN's, through torch                | no mask or a causal one; bf16, fp16; heads of up to 128          |
| flash     | FlashAttention 2, through torch       | those and windows; heads of up to 256                            |
| efficient | xformers' kernel, through torch       | no mask or a causal one; fp32 too                                |
| flex      | FlexAttention, compiled by Inductor   | every rule; heads from 16 on                                     |
| sdpa      | torch's scaled_dot_product_attention  | every mask; the scores of all queries may be in memory           |
| dense     | products and a softmax                | everything; the scores are in memory                             |

Sources: torch, "scaled_dot_product_attention" and "flex_attention" (documentation of 2.11); Dao, "FlashAttention-2"
(arXiv 2307.08691); Rabe and Staats (2112.05682). That cuDNN takes masks in memory is not used: its gradients were NaN
where 64 keys are left over (reported to torch as "cuDNN backward returns NaN grad_q for seq_len % 128 == 64").
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

CUDNN, FLASH, EFFICIENT, FLEX, SDPA, DENSE = NAMES = ("cudnn", "flash", "efficient", "flex", "sdpa", "dense")

_NARROW: Final = (torch.bfloat16, torch.float16)


class Machine(NamedTuple):
    """Properties of the machine that decide, beside the call: `capability` is 90 for 9.0, and 0 on CPUs."""

    device_type: str
    capability: int
    has_triton: bool
    is_deterministic: bool
    """torch.use_deterministic_algorithms."""


class Call(NamedTuple):
    """One call's sizes; the same for all calls that one choice is good for."""

    dtype: torch.dtype
    batch_size: int
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    value_dim: int
    window: tuple[int, int] | None
    """See `window_of`."""
    has_changes: bool
    """Of scores."""
    needs_grad: bool


def candidates(machine: Machine, call: Call) -> tuple[str, ...]:
    """Names of what is worth measuring for the call; never empty. The first is the rule's choice."""
    names = serving(machine, call)
    if len(names) > 1 and FLEX in names and call.window in _PLAIN and not call.has_changes:
        # It would have to be compiled to be compared, and is behind where the others serve.
        return tuple(name for name in names if name != FLEX)
    return names


def serving(machine: Machine, call: Call) -> tuple[str, ...]:
    """Names of what can serve the call, best first; "dense", which always can, where nothing else does."""
    if not (call.batch_size and call.num_heads and call.num_queries and call.num_keys and call.value_dim):
        return (DENSE,)
    if machine.device_type != "cuda":
        return (DENSE,) if call.has_changes else (SDPA,)
    return tuple(name for name, serves in _KERNELS if serves(machine, call)) or (DENSE,)


_PLAIN: Final = ((-1, -1), (-1, 0))
"""All keys, and causal."""


def _cudnn_serves(machine: Machine, call: Call) -> bool:
    return (
        machine.capability >= 90
        and not machine.is_deterministic
        and call.dtype in _NARROW
        and call.head_dim == call.value_dim <= 128
        and call.window in _PLAIN
        and not call.has_changes
        and call.num_queries > 1
        and _is_aligned(call)
    )


def _flash_serves(machine: Machine, call: Call) -> bool:
    return (
        machine.capability >= 80
        and call.dtype in _NARROW
        and call.head_dim == call.value_dim <= 256
        and call.window is not None
        and not call.has_changes
        and _is_aligned(call)
    )


def _is_aligned(call: Call) -> bool:
    """Some kernels align the last query with the last key where not all keys are seen."""
    return call.window == (-1, -1) or call.num_queries == call.num_keys


def _efficient_serves(machine: Machine, call: Call) -> bool:
    return (
        machine.capability >= 80
        and not machine.is_deterministic
        and call.dtype in (*_NARROW, torch.float32)
        and call.window in _PLAIN
        and not call.has_changes
    )


def _flex_serves(machine: Machine, call: Call) -> bool:
    return (
        machine.has_triton
        and machine.capability >= 80
        and call.dtype in (*_NARROW, torch.float32)
        and call.head_dim >= 16
        and call.value_dim >= 16
    )


_KERNELS: Final = (
    (CUDNN, _cudnn_serves),
    (FLASH, _flash_serves),
    (EFFICIENT, _efficient_serves),
    (FLEX, _flex_serves),
)
