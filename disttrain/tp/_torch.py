"""The one door to what torch keeps private about modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def shown_as(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within, the module's own parameters of these names are plain tensors, which need not be parameters."""
    own = dict(module._parameters)
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)


def own_parameters(module: nn.Module, *names: str) -> list[nn.Parameter | None]:
    """The module's own parameters; quicker than by attribute."""
    return [module._parameters.get(name) for name in names]


def is_compiled(module: nn.Module) -> bool:
    """Whether `compile()` was called on this module itself."""
    return module._compiled_call_impl is not None


def saved_tensors_hooks() -> object:
    """What stands over the tensors that autograd saves now, such as activation checkpointing; else None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def as_own(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no view: what an autograd function returns can be written to then."""
    own: torch.Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape) if tensor._is_view() else tensor
    return own
