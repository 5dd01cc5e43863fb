"""The only file of `experts.models` that knows torch's private names: of modules, to copy them for trials."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def copied(
    module: nn.Module,
    of_attribute: Callable[[Any], Any],
    of_parameter: Callable[[torch.Tensor], nn.Parameter],
    of_buffer: Callable[[torch.Tensor], torch.Tensor],
) -> nn.Module:
    """A module of the same class without hooks, made without its `__init__`, of what the functions give."""
    result: nn.Module = object.__new__(type(module))
    for name, value in vars(module).items():
        is_of_hooks = name.startswith("_") and "hooks" in name and isinstance(value, dict)
        result.__dict__[name] = OrderedDict() if is_of_hooks else of_attribute(value)
    result.__dict__["_parameters"] = {
        name: None if value is None else of_parameter(value) for name, value in module._parameters.items()
    }
    result.__dict__["_buffers"] = {
        name: None if value is None else of_buffer(value) for name, value in module._buffers.items()
    }
    result.__dict__["_modules"] = {
        name: None if child is None else copied(child, of_attribute, of_parameter, of_buffer)
        for name, child in module._modules.items()
    }
    return result
