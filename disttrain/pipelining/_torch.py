"""The one door to what torch keeps private about hooks of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within, what `register_hook` has put on these tensors is not called."""
    hooks = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    for tensor, _ in hooks:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, of_tensor in hooks:
            tensor._backward_hooks = of_tensor
