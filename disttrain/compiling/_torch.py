"""The only file of `compiling` that knows torch's private names."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _python_dispatch, checkpoint

_POLICY_MODES = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def is_under_policy() -> bool:
    """True while a policy of selective activation checkpointing decides about the operators that are called."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _POLICY_MODES) for mode in _python_dispatch._get_current_dispatch_mode_stack())


def is_compiled(module: nn.Module) -> bool:
    """True if `module.compile()` or `torch.compile(module)` has made it what it is."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
