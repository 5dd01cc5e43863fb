"""The only file of `compiling` that knows torch's private names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch, _pytree, checkpoint
from torch.utils.hooks import RemovableHandle

_POLICY_MODES = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


without_overrides: Any = torch._C.DisableTorchFunctionSubclass
"""Within it torch does not look for a subclass's `__torch_function__`, so reading an attribute takes half the time."""

tree_flatten: Any = _pytree.tree_flatten
tree_leaves: Any = _pytree.tree_leaves
tree_unflatten: Any = _pytree.tree_unflatten


def registers_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """The children, parameters and buffers of a module, by name."""
    return module._modules, module._parameters, module._buffers


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The hooks of a module's calls."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def num_handles() -> int:
    """The number of hooks that were ever registered in this process: the next one's key."""
    return RemovableHandle.next_id


_GRAD, _REQUIRES_GRAD = attrgetter("grad"), attrgetter("requires_grad")


def grads_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradient of each."""
    with without_overrides():
        return [*map(_GRAD, tensors)]


def which_require_grad(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each, whether it requires a gradient."""
    with without_overrides():
        return [*map(_REQUIRES_GRAD, tensors)]


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The number of writes to each that torch has seen."""
    with without_overrides():
        return [tensor._version for tensor in tensors]


def is_under_policy() -> bool:
    """True while a policy of selective activation checkpointing decides about the operators that are called."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _POLICY_MODES) for mode in _python_dispatch._get_current_dispatch_mode_stack())


def is_compiled(module: nn.Module) -> bool:
    """True if `module.compile()` or `torch.compile(module)` has made it what it is."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count a write to each, where torch did not see it."""
    torch.autograd.graph.increment_version(tensors)
