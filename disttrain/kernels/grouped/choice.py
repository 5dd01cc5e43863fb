"""Chooses what computes rows and products by expert: Triton's kernels, torch's grouped products, or its operators."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F

from disttrain.kernels.choice import choose, has_triton
from disttrain.kernels.grouped import reference
from disttrain.settings import KERNELS, TRITON_INTERPRET

_CAPABILITIES: Final = ((9, 0), (10, 0), (10, 3))
"""GPUs for which torch has grouped products of bf16 in one launch."""

_LINE: Final = 8
"""Rows of torch's grouped products begin at multiples of 16 bytes."""


def rows_of(tensor: torch.Tensor) -> Any:
    """The module that sorts, takes and combines rows for what is on `tensor`'s device."""
    return choose("experts", tensor, "", reference, _load_rows)


def sorter_of(experts: torch.Tensor) -> Any:
    """The module that sorts `experts`, integers."""
    can_launch = KERNELS.read() != "reference" and experts.numel() and (experts.is_cuda or TRITON_INTERPRET.read())
    return _load_rows() if can_launch and has_triton() else reference


def products_of(tensor: torch.Tensor) -> Any:
    """The module with products by expert, biases and gates for what is on `tensor`'s device."""
    return choose("experts", tensor, "", reference, _load_products)


def product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Each expert's rows times its weight, (out, in), or (in, out) if transposed. What lies past the last end of the
    result is not written."""
    module = products_of(x)
    if module is not reference and _is_for_torch(x, weight):
        return F.grouped_mm(x, weight if is_transposed else weight.transpose(1, 2), offs=ends)
    result: torch.Tensor = module.product(x, weight, ends, is_transposed)
    return result


def outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(experts, A, B): for each expert its rows of `left` (rows, A), transposed, times those of `right` (rows, B)."""
    module = products_of(left)
    if module is not reference and _is_for_torch(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    result: torch.Tensor = module.outer(left, right, ends)
    return result


def _is_for_torch(*tensors: torch.Tensor) -> bool:
    return (
        all(
            tensor.dtype == torch.bfloat16
            and tensor.is_contiguous()
            and tensor.shape[-1] % _LINE == 0
            and tensor.data_ptr() % 16 == 0
            and (tensor.dim() == 2 or tensor.shape[1] % _LINE == 0)
            for tensor in tensors
        )
        and _capability(tensors[0].device) in _CAPABILITIES
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _load_rows() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.grouped import triton_rows

    return triton_rows


def _load_products() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.grouped import triton_products

    return triton_products
