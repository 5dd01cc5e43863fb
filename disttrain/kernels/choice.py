"""Chooses between a Triton kernel and its reference by torch's operators, which also judges the kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, TypeVar

import torch

from disttrain.errors import BackendError
from disttrain.kernels._torch import as_constant, is_traced
from disttrain.settings import KERNELS, TRITON_INTERPRET

T = TypeVar("T")

_FEW_ELEMENTS: Final = 1 << 22
"""Of a tensor that a GPU reads and writes in less than it takes to launch a kernel twice, for which a graph is better
off with operators that its compiler fuses with those around them."""


def choose(
    operation: str,
    tensor: torch.Tensor,
    obstacle: str,
    reference: T,
    load_kernels: Callable[[], T],
    *,
    is_fused_when_traced: bool = False,
    takes_all_dtypes: bool = False,
) -> T:
    """The module with Triton's kernels for what is on `tensor`'s device, or `reference`, which has the same functions.

    Args:   obstacle  why the kernels don't take these arguments, a whole sentence; empty where they do.
            is_fused_when_traced  the reference serves a small `tensor` in graphs that are traced for a compiler.
    Raises: BackendError where the setting DISTTRAIN_KERNELS is "triton" and they can't be used.
    """
    wish = KERNELS.read()
    if wish == "reference" or not tensor.numel() or not (tensor.is_cuda or TRITON_INTERPRET.read()):
        return reference
    if wish != "triton" and is_fused_when_traced and is_traced() and tensor.numel() <= _FEW_ELEMENTS:
        return reference
    reason = obstacle or _obstacle_of(tensor, takes_all_dtypes=takes_all_dtypes)
    if not reason:
        return load_kernels()
    tell_fallback(operation, reason, is_slow=tensor.is_cuda)
    return reference


@as_constant
def tell_fallback(operation: str, reason: str, is_slow: bool = True) -> None:
    """Reports that torch's operators compute in a kernel's place: raises if asked to be strict, or warns if it
    `is_slow`."""
    if KERNELS.read() == "triton":
        raise BackendError(operation, reason, "Set DISTTRAIN_KERNELS=auto to compute it by torch's operators.")
    if is_slow:
        _warn(operation, reason)


def _obstacle_of(tensor: torch.Tensor, *, takes_all_dtypes: bool) -> str:
    if not has_triton():
        return "Triton is not installed."
    if not takes_all_dtypes and tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels don't take {tensor.dtype}."
    return ""


@cache
def _warn(operation: str, reason: str) -> None:
    """Warns once for each reason."""
    warnings.warn(f"{operation}: {reason} It is computed by torch's operators.", stacklevel=3)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over elements of `dtype` are computed."""
    return torch.promote_types(dtype, torch.float32)


@cache
def num_programs(device: torch.device) -> int:
    """The number of persistent programs that keep `device` busy."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return properties.multi_processor_count if properties else 4


@cache
def shared_bytes(device: torch.device) -> int:
    """The shared memory of a program on `device`, in bytes."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return properties.shared_memory_per_block_optin if properties else 64 << 10
