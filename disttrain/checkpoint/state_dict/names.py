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
        if module is None or not _is_wrapper_of(module, part):
            parts.append(part)
        module = None if module is None else _child(module, part, modifiers)
    return ".".join(parts)


def _is_wrapper_of(module: nn.Module, part: str) -> bool:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return part == "module"
    return part == "_orig_mod" and part in dict(module.named_children())


def _child(module: nn.Module, part: str, modifiers: str) -> nn.Module | None:
    renamed = getattr(module, modifiers, None)
    hidden = None if renamed is None else renamed().get(part)
    if hidden is not None and isinstance(getattr(module, hidden, None), nn.Module):
        module = getattr(module, hidden)
    child = getattr(module, part, None)
    return child if isinstance(child, nn.Module) else None


def parameter_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """The canonical names of each parameter: one, or several where it is tied."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(canonical_name(model, name))
    return names


def prefixes_of(model: nn.Module, submodules: Iterable[nn.Module]) -> list[str]:
    """What the names within these submodules begin with."""
    wanted = set(submodules)
    return [f"{canonical_name(model, name)}." for name, module in model.named_modules() if module in wanted]
