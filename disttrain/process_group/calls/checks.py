"""Checks of the arguments of collectives, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

import torch

from disttrain.errors import GroupError, ShapeError
from disttrain.process_group.group import ProcessGroup

_dtype_of: Final = attrgetter("dtype")
_device_of: Final = attrgetter("device")
_is_cpu: Final = attrgetter("is_cpu")
_is_contiguous: Final[Callable[[torch.Tensor], bool]] = torch.Tensor.is_contiguous


def peer_rank(operation: str, group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """The peer's rank in the group, from its global rank or its rank in the group: exactly one is given."""
    if (rank is None) == (group_rank is None):
        raise GroupError(
            operation,
            f"{name}={rank} and group_{name}={group_rank} are given.",
            "Give exactly one of the two.",
            rank=group.world.rank,
        )
    if rank is not None:
        return group.group_rank_of(operation, rank)
    assert group_rank is not None
    return group.checked_group_rank(operation, group_rank)


def root_rank(operation: str, group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """As `peer_rank`; with neither given, global rank 0."""
    return peer_rank(operation, group, 0 if rank is None and group_rank is None else rank, group_rank, name)


def check_contiguous(operation: str, group: ProcessGroup, name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError for a tensor with gaps, or in another order."""
    if not tensor.is_contiguous():
        raise ShapeError(
            operation,
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; it must be contiguous.",
            "Pass its .contiguous() copy, and copy the result back if you need it in place.",
            rank=group.world.rank,
        )


def check_pair(
    operation: str, group: ProcessGroup, output: torch.Tensor, input: torch.Tensor, *, gathers: bool
) -> None:
    """Raise ShapeError unless the whole has group_size times the elements of the part, and both are alike."""
    whole, part = (output, input) if gathers else (input, output)
    if whole.numel() != part.numel() * group.group_size:
        raise ShapeError(
            operation,
            f"output has shape {tuple(output.shape)}, input {tuple(input.shape)}, the group {group.group_size} ranks; "
            f"{'output' if gathers else 'input'} must have {group.group_size} times the other's elements.",
            f"Allocate {part.numel() * group.group_size} elements for it, not {whole.numel()}; pad uneven parts.",
            rank=group.world.rank,
        )
    check_alike(operation, group, output, input)


def check_alike(operation: str, group: ProcessGroup, output: torch.Tensor, input: torch.Tensor) -> None:
    """Raise ShapeError unless both have one dtype and device, and are contiguous."""
    # torch has one object for each dtype, and is quickest to say whether a tensor is on the CPU.
    if output.dtype is not input.dtype or (not output.is_cpu if input.is_cpu else output.device != input.device):
        raise ShapeError(
            operation,
            f"output is {output.dtype} on {output.device}, input {input.dtype} on {input.device}; they must be alike.",
            "Convert one of them first.",
            rank=group.world.rank,
        )
    if not (output.is_contiguous() and input.is_contiguous()):
        check_contiguous(operation, group, "output", output)
        check_contiguous(operation, group, "input", input)


def check_is_list(name: str, tensors: object) -> None:
    """Raise TypeError for one tensor in place of a list: it would be taken for a list of its rows."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{name} is one tensor, of shape {tuple(tensors.shape)}, and no list of tensors")


def check_list(
    operation: str,
    group: ProcessGroup,
    name: str,
    tensors: Sequence[torch.Tensor],
    like: torch.Tensor,
    *,
    like_index: int | None = None,
    has_one_size: bool = False,
) -> None:
    """Raise ShapeError unless `tensors` has one tensor per rank, contiguous, of the dtype and device of `like`.

    The one at `like_index` has the size of `like` too; with `has_one_size`, all have.
    """
    check_is_list(name, tensors)
    if len(tensors) != group.group_size:
        raise ShapeError(
            operation,
            f"{name} has {len(tensors)} tensors, the group {group.group_size} ranks.",
            "Give one tensor per rank, in group order.",
            rank=group.world.rank,
        )
    check_contiguous(operation, group, "this rank's tensor", like)
    num = len(tensors)
    # In three passes, each of which is one loop in C.
    if (
        [*map(_dtype_of, tensors)].count(like.dtype) < num
        or (not all(map(_is_cpu, tensors)) if like.is_cpu else [*map(_device_of, tensors)].count(like.device) < num)
        or not all(map(_is_contiguous, tensors))
    ):
        for tensor in tensors:
            check_alike(operation, group, tensor, like)
    shape = like.shape
    for index in range(num) if has_one_size else () if like_index is None else (like_index,):
        tensor = tensors[index]
        if tensor.shape != shape and tensor.numel() != like.numel():
            raise ShapeError(
                operation,
                f"{name}[{index}] has shape {tuple(tensor.shape)}, this rank's own tensor {tuple(like.shape)}; "
                "they must have the same number of elements.",
                "Allocate what each rank contributes.",
                rank=group.world.rank,
            )


def row_counts(
    operation: str, group: ProcessGroup, name: str, shape: torch.Size, sizes: Sequence[int] | None
) -> list[int]:
    """The number of rows of dim 0 for each rank: `sizes`, or equal parts. Raises ShapeError when they don't add up."""
    num_rows = shape[0] if shape else 0
    if not sizes:
        if num_rows % group.group_size or not shape:
            raise ShapeError(
                operation,
                f"{name} has shape {tuple(shape)}; dim 0 cannot be cut in {group.group_size} equal parts.",
                f"Give {name}_split_sizes.",
                rank=group.world.rank,
            )
        return [num_rows // group.group_size] * group.group_size
    if len(sizes) != group.group_size or sum(sizes) != num_rows or min(sizes) < 0:
        raise ShapeError(
            operation,
            f"{name}_split_sizes={list(sizes)} are not {group.group_size} sizes that add up to dim 0 of {name}, "
            f"which has {num_rows} rows.",
            "Give one number of rows per rank.",
            rank=group.world.rank,
        )
    return list(sizes)
