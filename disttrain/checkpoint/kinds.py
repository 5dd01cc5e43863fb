"""Checks the arguments of the functions for state dicts: a model, optimizers, dicts."""

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
    optimizer_list = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for optimizer in optimizer_list:
        if not hasattr(optimizer, "param_groups"):
            _refuse(operation, "optimizers", optimizer, "Give an optimizer, or a list of them.")
    return optimizer_list


def check_dict(operation: str, name: str, value: Any) -> None:
    """Raise ArgumentError for what is no dict."""
    if not isinstance(value, Mapping):
        _refuse(operation, name, value, "Give the dict that the function of the same name with `get` returns.")


def _refuse(operation: str, name: str, value: Any, remedy: str) -> None:
    kind = type(value)
    raise ArgumentError(operation, f"{name} is or has a {kind.__module__}.{kind.__qualname__}.", remedy)
