"""Cuts tensors in place to the positions of a rank, and gives them back what they were.

A tensor that is cut takes other memory, and the memory that it had stays as it is: other tensors may view it, as inputs
and labels view the same tokens. So nothing is copied to restore it either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from disttrain.errors import ArgumentError, ShapeError
from disttrain.kernels.attention.context.parts import Parts

NAME: Final = "context_parallel"
_KINDS: Final = "Give plain tensors that take no gradient, none twice."


class Buffers(NamedTuple):
    """Tensors, each with the dim of its positions, and whether it is to be restored; `length` positions."""

    tensors: tuple[torch.Tensor, ...]
    dims: tuple[int, ...]
    are_restored: tuple[bool, ...]
    length: int


def read_buffers(
    operation: str, tensors: object, dims: object, not_restored: object, rank: int, *, may_be_parts: bool = False
) -> Buffers:
    """Raises ArgumentError and ShapeError for what cannot be cut. `may_be_parts`: they are not cut in place.

    The first has the positions that there are. Tables of them along dim 0, such as rotary angles, may know more.
    """
    if not isinstance(tensors, Sequence) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ArgumentError(operation, "the buffers are no list of tensors.", _KINDS, rank=rank)
    if not isinstance(dims, Sequence) or not all(isinstance(dim, int) for dim in dims):
        raise ArgumentError(operation, "the dims of positions are no list of numbers.", "Give one a buffer.", rank=rank)
    if len(tensors) != len(dims) or not tensors:
        problem = f"there are {len(tensors)} buffers and {len(dims)} dims of positions."
        raise ShapeError(operation, problem, "Give one buffer or more, and a dim for each.", rank=rank)
    lengths = []
    for number, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        if not -tensor.dim() <= dim < tensor.dim():
            problem = f"buffer {number} of shape {tuple(tensor.shape)} has no dim {dim}."
            raise ShapeError(operation, problem, "Give the dim of its positions.", rank=rank)
        lengths.append(tensor.shape[dim])
        if not may_be_parts:
            _check_can_be_cut(operation, number, tensor, rank)
    are_tables = [not may_be_parts and dim % tensor.dim() == 0 for tensor, dim in zip(tensors, dims, strict=True)]
    if any(
        length < lengths[0] or (length > lengths[0] and not is_table)
        for length, is_table in zip(lengths, are_tables, strict=True)
    ):
        problem = f"the buffers have {', '.join(map(str, lengths))} positions."
        remedy = "Give buffers of one length; only tables along dim 0 may be longer than the first buffer."
        raise ShapeError(operation, problem, remedy if not may_be_parts else "Give parts of one length.", rank=rank)
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ArgumentError(operation, "a buffer is given twice.", _KINDS, rank=rank)
    if not isinstance(not_restored, Collection) or not {*map(id, not_restored)} <= {*map(id, tensors)}:
        problem = "no_restore_buffers has a tensor that is none of the buffers."
        raise ArgumentError(operation, problem, "Give some of the buffers.", rank=rank)
    left = {*map(id, not_restored)}
    return Buffers(tuple(tensors), tuple(dims), tuple(id(tensor) not in left for tensor in tensors), lengths[0])


def _check_can_be_cut(operation: str, number: int, tensor: torch.Tensor, rank: int) -> None:
    if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        raise ArgumentError(operation, f"buffer {number} takes a gradient.", _KINDS, rank=rank)
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Buffer:
        raise ArgumentError(operation, f"buffer {number} is a {type(tensor).__name__}.", _KINDS, rank=rank)


@contextmanager
def cut_in_place(buffers: Buffers, parts: Parts, rank: int) -> Iterator[None]:
    """Leaves in each tensor the positions of `rank`, the coordinate on the axis, while the block runs."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for tensor, dim, is_restored in zip(buffers.tensors, buffers.dims, buffers.are_restored, strict=True):
                known = tensor.narrow(dim, 0, buffers.length)
                part = parts.take(known, rank, dim).clone(memory_format=torch.contiguous_format)
                if is_restored:
                    kept.append((tensor, tensor.detach()))
                tensor.data = part
        yield
    finally:
        for tensor, before in kept:
            tensor.data = before
