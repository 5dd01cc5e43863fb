"""What is asked of the arguments of state dicts: a model, optimizers, dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from disttrain.errors import ArgumentError


def check_model(operation: str, model: Any) -> None:
    """Raise ArgumentError for what is no module."""
    if not isinstance(model, nn.Module):
        _refuse(operation, "model", model, "Give the model itself, an nn.Module.")


def listed(operation: str, optimizers: Any) -> list[Optimizer]:
    """One optimizer or several, as a list. Raises ArgumentError for what has no groups of parameters."""
    found = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for optimizer in found:
        if not hasattr(optimizer, "param_groups"):
            _refuse(operation, "optimizers", optimizer, "Give an optimizer, or a list of them.")
    return found


def check_dict(operation: str, name: str, given: Any) -> None:
    """Raise ArgumentError for what is no dict."""
    if not isinstance(given, Mapping):
        _refuse(operation, name, given, "Give the dict that the function of the same name with `get` returns.")


def _refuse(operation: str, name: str, given: Any, remedy: str) -> None:
    kind = type(given)
    raise ArgumentError(operation, f"{name} is or has a {kind.__module__}.{kind.__qualname__}.", remedy)
