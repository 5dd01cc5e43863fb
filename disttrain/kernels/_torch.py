"""The only file of `kernels` that knows torch's private names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


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


def version_of(tensor: torch.Tensor, local: torch.Tensor) -> tuple[int, ...]:
    """Another one when torch's operators have written to the tensor or to `local`, its part, or that is another one."""
    # What goes through a DTensor counts there alone.
    return local.data_ptr(), local._version, tensor._version


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy, and cast, each source to its target, in few kernels."""
    torch._foreach_copy_(list(targets), list(sources))
