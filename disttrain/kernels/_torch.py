"""The only file of `kernels` that knows torch's private names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

without_torch_function: Any = torch._C._disabled_torch_function_impl
"""As the `__torch_function__` of a class of tensors: what is done with them is dispatched as with any."""

make_wrapper: Any = torch.Tensor._make_wrapper_subclass
"""A tensor of the given class, without memory of its own."""

map_tensors: Any = tree_map_only
"""In nested arguments, put a function's result in place of each value of a class."""


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def modes() -> tuple[Any, ...]:
    """What of a `with` decides how operators are computed and differentiated; a trace of operators doesn't tell it."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *autocast,
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


def norms(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """The norm of each, in one launch where they are plain tensors of one device and dtype."""
    return torch._foreach_norm(list(tensors), 2.0, dtype)


def scaled_mm(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype, is_fast: bool
) -> torch.Tensor:
    """a (M, K) times b (N, K) transposed, both in float8, with one scale each, or one for each row."""
    if a_scales.numel() == b_scales.numel() == 1:
        return torch._scaled_mm(a, b.t(), a_scales, b_scales, out_dtype=dtype, use_fast_accum=is_fast)
    # With scales for rows, results come in bf16 alone.
    result = torch._scaled_mm(
        a, b.t(), a_scales[:, None], b_scales[None, :], out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )
    return result.to(dtype)
