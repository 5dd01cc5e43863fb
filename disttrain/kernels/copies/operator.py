"""Copies many tensors to others, in other dtypes, in one launch: for packing communication and for scaled gradients.

`pack_rows` and `unpack_rows` are those of gathers and reductions: a row of their matrix is what a rank sends or gets.
torch's own find their tensors by addresses that are copied to the GPU for each launch, 7 us of its time, and pack at a
quarter of the memory's speed.


torch's own copy of a list of tensors from bf16 to fp32 reaches three quarters of the memory's speed on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from disttrain.kernels.choice import choose
from disttrain.kernels.copies import reference as copies_reference
from disttrain.kernels.recording import current_recording
from disttrain.settings import KERNELS, TRITON_INTERPRET

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_MANY_ELEMENTS: Final = 1 << 23
"""Of rows for which torch's operators need longer than the host to launch a kernel. On an H200 gradients in bf16 of 3
million elements take them 11 us, and 30 of the host, the kernel 5 us and 50; of 54 million they take 240 us, it 110."""
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Others stand for a tensor while a graph is traced, or are made of several."""


def copy_all(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], scale: torch.Tensor | None = None
) -> None:
    """Write each source to the target of the same shape, in its dtype.

    Args:   scale  (), on the same device: a factor for all, multiplied in fp32 (fp64 of fp64).
    """
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if not pairs:
        return
    targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
    kernels = copies_reference
    if _are_alike(targets) and _are_alike(sources):
        kernels = choose("copy", targets[0], "", copies_reference, _load)
    kernels.copy_all(targets, sources, scale)


def pack_rows(tensors: Sequence[torch.Tensor], sizes: Sequence[int], matrix: torch.Tensor) -> None:
    """Cut dim 0 of each tensor into as many pieces as `matrix` has rows, and lay them out in it.

    Args: sizes  elements of a piece of each tensor, with the padding behind what torch.chunk cuts; they fill a row.
    """
    tensors, sizes = _with_elements(tensors, sizes)
    if tensors:
        _rows_kernels(matrix, tensors).pack_rows(tensors, sizes, matrix)


def unpack_rows(matrix: torch.Tensor, sizes: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Cut each row of `matrix` into pieces of `sizes`, and write those of one place to one tensor, (rows, size)."""
    tensors, sizes = _with_elements(tensors, sizes)
    if tensors:
        _rows_kernels(matrix, tensors).unpack_rows(matrix, sizes, tensors)


def _with_elements(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int]
) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
    if 0 not in sizes:
        return tensors, sizes
    return [tensor for tensor, size in zip(tensors, sizes, strict=True) if size], [size for size in sizes if size]


def _rows_kernels(matrix: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
    # First what is found out soonest: it is done for each layer.
    if not (matrix.is_cuda or TRITON_INTERPRET.read()):
        return copies_reference
    if matrix.numel() < _MANY_ELEMENTS and current_recording() is None and KERNELS.read() != "triton":
        return copies_reference
    dtypes = {tensor.dtype for tensor in tensors}
    is_cast = dtypes != {matrix.dtype}
    if (
        len(dtypes) == 1
        and not (is_cast and (matrix.dtype not in _DTYPES or dtypes.isdisjoint(_DTYPES)))
        and matrix.stride(-1) == 1
        and not matrix.is_complex()
        and all(type(tensor) in _PLAIN and tensor.is_contiguous() for tensor in tensors)
    ):
        return choose("copy", matrix, "", copies_reference, _load_rows, takes_all_dtypes=True)
    return copies_reference


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """True if the kernel takes them as one side. It is no operator: a graph gets torch's own, which compilers fuse."""
    dtype = tensors[0].dtype
    return dtype in _DTYPES and all(
        type(tensor) in _PLAIN and tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors
    )


def _load_rows() -> Any:
    # As below.
    from disttrain.kernels.copies import triton_rows

    return triton_rows


def _load() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.copies import triton_kernels as copies_triton

    return copies_triton
