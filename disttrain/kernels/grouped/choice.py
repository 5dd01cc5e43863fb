"""Chooses what computes rows and products by expert: Triton's kernels, torch's grouped products, or its operators."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F

from disttrain.kernels._torch import is_traced
from disttrain.kernels.choice import choose, has_triton
from disttrain.kernels.grouped import reference
from disttrain.settings import KERNELS, TRITON_INTERPRET

_CAPABILITIES: Final = ((9, 0), (10, 0), (10, 3))
"""GPUs for which torch has grouped products of bf16 in one launch."""

_LINE: Final = 8
"""Rows of torch's grouped products begin at multiples of 16 bytes."""


_LARGE: Final = 1 << 36
"""Products of a factor with another, from which on the GPU takes longer than the host takes to describe tensors."""


def kernels_of(tensor: torch.Tensor) -> Any:
    """The module with what computes on `tensor`'s device: `reference`, or what has the same functions."""
    return choose("experts", tensor, "", reference, _load)


def sorter_of(experts: torch.Tensor) -> Any:
    """The module that sorts `experts`, integers."""
    can_launch = KERNELS.read() != "reference" and experts.numel() and (experts.is_cuda or TRITON_INTERPRET.read())
    return _load() if can_launch and has_triton() else reference


def product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Each expert's rows times its weight, (out, in), or (in, out) if transposed. What lies past the last end of the
    result is not written."""
    kernels = kernels_of(x)
    if kernels is not reference and _is_for_torch(x, weight):
        if not is_transposed and not is_traced() and x.shape[0] * weight[0].numel() >= _LARGE:
            return kernels.product_by_tma(x, weight, ends)  # type: ignore[no-any-return]
        return F.grouped_mm(x, weight if is_transposed else weight.transpose(1, 2), offs=ends)
    result: torch.Tensor = kernels.product(x, weight, ends, is_transposed)
    return result


def outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(experts, A, B): for each expert its rows of `left` (rows, A), transposed, times those of `right` (rows, B)."""
    kernels = kernels_of(left)
    if kernels is not reference and _is_for_torch(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    result: torch.Tensor = kernels.outer(left, right, ends)
    return result


def _is_for_torch(*tensors: torch.Tensor) -> bool:
    return all(map(_is_aligned, tensors)) and _capability(tensors[0].device) in _CAPABILITIES


def _is_aligned(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype == torch.bfloat16
        and tensor.is_contiguous()
        and not any(size % _LINE for size in tensor.shape[1:])
        and not tensor.storage_offset() % _LINE
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def _load() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.grouped import triton_kernels

    return triton_kernels
