"""Chooses what computes rows and products by expert: Triton's kernels, torch's grouped products, or its operators."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import torch.nn.functional as F

from disttrain.kernels._torch import is_traced
from disttrain.kernels.choice import choose, has_triton
from disttrain.kernels.grouped import reference
from disttrain.kernels.grouped.table import Kernels
from disttrain.settings import KERNELS, TRITON_INTERPRET

_REFERENCE: Final[Kernels] = reference

_CAPABILITIES: Final = ((9, 0), (10, 0), (10, 3))
"""GPUs for which torch has grouped products of bf16 in one launch."""

_LINE: Final = 8
"""Rows of torch's grouped products begin at multiples of 16 bytes."""


_LARGE: Final = 1 << 36
"""Products of a factor with another, from which on the GPU takes longer than the host takes to describe tensors."""


def kernels_of(tensor: torch.Tensor) -> Kernels:
    """The module with what computes on `tensor`'s device."""
    return choose("experts", tensor, "", _REFERENCE, _load)


def sorter_of(experts: torch.Tensor) -> Kernels:
    """The module that sorts `experts`, integers."""
    can_launch = KERNELS.read() != "reference" and experts.numel() and (experts.is_cuda or TRITON_INTERPRET.read())
    return _load() if can_launch and has_triton() else _REFERENCE


def product(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, is_transposed: bool, kernels: Kernels | None = None
) -> torch.Tensor:
    """Each expert's rows times its weight, (out, in), or (in, out) if transposed. What lies past the last end of the
    result is not written. `kernels`: those of `x`, where they are known."""
    kernels = kernels or kernels_of(x)
    if kernels is not _REFERENCE and _is_for_torch(x, weight):
        if not is_transposed and not is_traced() and x.shape[0] * weight.shape[1] * weight.shape[2] >= _LARGE:
            # Of Hopper GPUs alone: there is no reference but torch's product.
            from disttrain.kernels.grouped.triton_tma import product_by_tma

            return product_by_tma(x, weight, ends)
        return F.grouped_mm(x, weight if is_transposed else weight.transpose(1, 2), offs=ends)
    return kernels.product(x, weight, ends, is_transposed)


def outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, kernels: Kernels | None = None) -> torch.Tensor:
    """(experts, A, B): for each expert its rows of `left` (rows, A), transposed, times those of `right` (rows, B)."""
    kernels = kernels or kernels_of(left)
    if kernels is not _REFERENCE and _is_for_torch(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    return kernels.outer(left, right, ends)


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
def _load() -> Kernels:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.grouped import triton_kernels

    return triton_kernels
