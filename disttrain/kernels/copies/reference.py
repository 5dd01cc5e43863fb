"""Copies by torch's operators, for CPUs and fp64; they judge the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.kernels._torch import chunk_cat, copy_each


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], scale: torch.Tensor | None) -> None:
    """Write each source to its target, in the target's dtype, and multiplied by `scale` ()."""
    if scale is None:
        copy_each(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        torch.mul(source, scale, out=target)


def pack_rows(tensors: Sequence[torch.Tensor], sizes: Sequence[int], matrix: torch.Tensor) -> None:
    """Cut dim 0 of each tensor into as many pieces as `matrix` has rows, of so many elements with padding by zeros; row
    r gets the r-th of each, one after the other, cast."""
    chunk_cat(tensors, len(matrix), out=matrix)


def unpack_rows(matrix: torch.Tensor, sizes: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Cut each row into pieces of so many elements; each tensor, (rows, size), gets those of its place, cast."""
    cast = matrix if not tensors or matrix.dtype == tensors[0].dtype else matrix.to(tensors[0].dtype)
    torch.split_with_sizes_copy(cast, list(sizes), dim=1, out=list(tensors))
