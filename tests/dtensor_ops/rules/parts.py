"""Parts of a tensor for a placement, and the tensor of its parts, without DTensor's own code.

Partial ones are those of torch's validator of strategies: shares of different size and sign on each rank, so that what
is not linear, or not monotonous, shows. What it has no parts for, or wrong ones, has them here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor._ops.strategy_validation import _checkerboard_mask, _create_partial_input
from torch.distributed.tensor.placement_types import Partial as TorchPartial

from disttrain.dtensor import Partial, Placement, Replicate, StridedShard
from disttrain.dtensor.spec.placement import NormPartial


class NoParts(Exception):
    """No parts make up this tensor, or none that torch can reduce."""


def parts_of(
    tensor: torch.Tensor, placement: Placement, num_ranks: int, place: int, mask_shift: int
) -> list[torch.Tensor]:
    """What each rank holds; `place` among the operands and `mask_shift` vary how Partial ones are shared out."""
    if isinstance(placement, Replicate):
        return [tensor.clone() for _ in range(num_ranks)]
    if isinstance(placement, Partial):
        return _shares(tensor, placement, num_ranks, place, mask_shift)
    return [cut(tensor, placement, num_ranks, rank).clone() for rank in range(num_ranks)]


def cut(tensor: torch.Tensor, placement: Placement, num_ranks: int, rank: int) -> torch.Tensor:
    """Rank's piece of the placement's dim: of each of its blocks what torch.chunk gives."""
    dim = placement.cut_dim
    assert dim is not None
    num_blocks = placement.num_blocks if isinstance(placement, StridedShard) else 1
    pieces = []
    for block in tensor.tensor_split(num_blocks, dim) if num_blocks > 1 else [tensor]:
        chunks = block.chunk(num_ranks, dim)
        pieces.append(chunks[rank] if rank < len(chunks) else block.narrow(dim, 0, 0))
    return torch.cat(pieces, dim)


def _shares(
    tensor: torch.Tensor, placement: Partial, num_ranks: int, place: int, mask_shift: int
) -> list[torch.Tensor]:
    reduce_op = placement.reduce_op
    mask = _checkerboard_mask(tensor, place, mask_shift).reshape(tensor.shape)
    if not bool(tensor.isfinite().all()):
        raise NoParts("what is not finite cannot be shared out")
    if isinstance(placement, NormPartial):
        return _shares_of_norm(tensor, placement.order, num_ranks)
    if tensor.is_complex() and reduce_op in ("min", "max"):
        raise NoParts(f"complex numbers have no {reduce_op}")
    if tensor.dtype == torch.bool:
        if reduce_op not in ("min", "max"):
            raise NoParts(f"booleans have no {reduce_op}")
        # The other ranks hold what changes nothing.
        neutral = torch.full_like(tensor, reduce_op == "min")
        return [torch.where(mask == (rank == 0), tensor, neutral) for rank in range(num_ranks)]
    if reduce_op == "product":  # torch's validator gives every rank the whole, which is no way to make a product
        is_whole_number = not (tensor.is_floating_point() or tensor.is_complex())
        factor = torch.where(mask, *((1, -1) if is_whole_number else (2, -4))).to(tensor.dtype)
        others = [torch.ones_like(tensor) for _ in range(num_ranks - 2)]
        return [tensor * factor, factor if is_whole_number else 1 / factor, *others]
    if not tensor.dtype.is_floating_point and not tensor.is_complex():
        if reduce_op == "avg":
            raise NoParts("an average of integers is none")
        if reduce_op == "sum":  # torch's validator makes integers floats
            offset = torch.where(mask, tensor + 1, -3 - tensor)
            return [tensor + offset, -offset, *[torch.zeros_like(tensor)] * (num_ranks - 2)]
    made = _create_partial_input(tensor, TorchPartial(reduce_op), num_ranks, place, mask_shift)._local_tensors
    return [made[rank].to(tensor.dtype) for rank in range(num_ranks)]


def _shares_of_norm(tensor: torch.Tensor, order: float, num_ranks: int) -> list[torch.Tensor]:
    if not tensor.is_floating_point() or bool((tensor < 0).any()):
        raise NoParts("a norm is not negative")
    if order in (float("inf"), float("-inf")):
        other = tensor / 2 if order > 0 else tensor * 2
        return [tensor, *[other.clone() for _ in range(num_ranks - 1)]]
    weights = torch.arange(1, num_ranks + 1, dtype=tensor.dtype)
    return [tensor * (weight / weights.sum()) ** (1 / order) for weight in weights]


def whole_of(parts: Sequence[torch.Tensor], placement: Placement, shape: torch.Size) -> torch.Tensor:
    """The tensor of `shape` of which these are the parts. ValueError when they are not."""
    if isinstance(placement, Replicate):
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], equal_nan=True, msg=lambda text: f"ranks differ: {text}")
        return parts[0]
    if isinstance(placement, Partial):
        return _reduced(torch.stack(list(parts)), placement)
    whole = torch.empty(shape, dtype=parts[0].dtype)
    positions = torch.arange(shape.numel()).reshape(shape)
    for rank, part in enumerate(parts):
        where = cut(positions, placement, len(parts), rank)
        if where.shape != part.shape:
            raise ValueError(
                f"rank {rank} has {tuple(part.shape)}, and {placement} of {tuple(shape)} gives it not that"
            )
        whole.view(-1)[where.reshape(-1)] = part.reshape(-1)
    return whole


def _reduced(parts: torch.Tensor, placement: Partial) -> torch.Tensor:
    if isinstance(placement, NormPartial):
        return torch.linalg.vector_norm(parts, placement.order, dim=0)
    match placement.reduce_op:
        case "sum":
            return parts.sum(0, dtype=parts.dtype)
        case "avg":
            return parts.mean(0)
        case "min":
            return parts.amin(0)
        case "max":
            return parts.amax(0)
        case "product":
            return parts.prod(0, dtype=parts.dtype)
    raise ValueError(f"nobody reduces by {placement.reduce_op}")
