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


def has_pre_hooks(module: nn.Module) -> bool:
    """Whether something is done before the module's forward, such as gathering its parameters."""
    return bool(module._forward_pre_hooks)
