"""Tensors of one shape as one tensor, each with its own gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttrain.kernels._torch import is_transformed


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors along a new dim 0: a view where they lie at even distances in one storage, else a copy."""
    stride = _distance(tensors)
    if stride is None:
        return torch.stack(list(tensors))
    result: torch.Tensor = _SideBySide.apply(stride, *tensors)  # type: ignore[no-untyped-call]
    return result


def lie_evenly(tensors: Sequence[torch.Tensor]) -> bool:
    """True if `stacked` copies nothing."""
    return _distance(tensors) is not None


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stride: int, *tensors: torch.Tensor) -> torch.Tensor:
        first = tensors[0]
        return first.detach().as_strided((len(tensors), *first.shape), (stride, *first.stride()))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *grads[0].unbind(0)


def _distance(tensors: Sequence[torch.Tensor]) -> int | None:
    """Elements from one tensor to the next where all are at the same, in one storage; else None."""
    first = tensors[0]
    if first.device.type == "meta" or not first.numel() or torch.compiler.is_compiling() or is_transformed():
        return None
    begin, size = first.data_ptr(), first.element_size()
    storage = first.untyped_storage().data_ptr()
    step = tensors[-1].data_ptr() - begin
    distance, rest = divmod(step, max(len(tensors) - 1, 1) * size)
    if rest or distance < 0 or (len(tensors) > 1 and distance < first.numel()):
        return None
    for index, tensor in enumerate(tensors):
        if (
            tensor.data_ptr() != begin + index * distance * size
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.stride() != first.stride()
            or tensor.shape != first.shape
            or tensor.dtype != first.dtype
        ):
            return None
    return distance
