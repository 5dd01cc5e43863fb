"""Canonical names: what a parameter was called before anything was wrapped around its module."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
FQN_MODIFIERS = "_fqn_modifiers"


def canonical_name(model: nn.Module, name: str, modifiers: str = FQN_MODIFIERS) -> str:
    """`name`, a key of the model's state dict, without what DDP, torch.compile and activation checkpoints put into it.

    `modifiers` names the method by which a module says which child a key goes through without naming it.
    """
    parts = []
    module: nn.Module | None = model
    for part in name.replace(_CHECKPOINT_WRAPPER, "").split("."):
        module = None if module is None else _named_child_or_itself(module, part, modifiers)
        if module is None or not _is_wrapper_of(module, part):
            parts.append(part)
        module = _module_in(module, part)
    return ".".join(parts)


def _named_child_or_itself(module: nn.Module, part: str, modifiers: str) -> nn.Module:
    """The module that has `part`: the child that keys leave out, where there is one."""
    left_out = getattr(module, modifiers, None)
    child = None if left_out is None else _module_in(module, left_out().get(part, ""))
    return module if child is None else child


def _is_wrapper_of(module: nn.Module, part: str) -> bool:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return part == "module"
    return part == "_orig_mod" and part in dict(module.named_children())


def _module_in(module: nn.Module | None, name: str) -> nn.Module | None:
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Module) else None


def parameter_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """The canonical names of each parameter: one, or several where it is tied."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(canonical_name(model, name))
    return names


def prefixes_of(model: nn.Module, submodules: Iterable[nn.Module]) -> list[str]:
    """Prefixes of the names within these submodules."""
    wanted = set(submodules)
    return [f"{canonical_name(model, name)}." for name, module in model.named_modules() if module in wanted]
