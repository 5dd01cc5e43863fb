"""Checks of the arguments of a vocabulary-parallel loss, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from disttrain.errors import ArgumentError, ShapeError
from disttrain.pieces import piece
from disttrain.process_group import ProcessGroup

NAME = "vocab_parallel_cross_entropy"
_REDUCTIONS = ("mean", "sum", "none")
_INDEX_DTYPES = (torch.int64, torch.int32)


class LossOptions(NamedTuple):
    """The arguments that are no tensors."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def check_kinds(logits: object, target: object, weight: object, options: LossOptions) -> None:
    """Raise ArgumentError for what is no tensor, or no number, where one belongs."""
    for name, tensor in (("logits", logits), ("target", target), ("weight", weight)):
        if not (isinstance(tensor, torch.Tensor) or (tensor is None and name == "weight")):
            raise ArgumentError(NAME, f"{name} is {type(tensor).__name__}.", "Give a tensor.")
    for name in ("ignore_index", "label_smoothing", "z_loss"):
        number = getattr(options, name)
        if not isinstance(number, int if name == "ignore_index" else int | float):
            raise ArgumentError(NAME, f"{name} is {type(number).__name__}.", "Give a number.")


def check_options(options: LossOptions, target: torch.Tensor, rank: int) -> None:
    if options.reduction not in _REDUCTIONS:
        reductions = ", ".join(_REDUCTIONS)
        raise ShapeError(NAME, f"there is no reduction {options.reduction!r}.", f"Known are {reductions}.", rank=rank)
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ShapeError(
            NAME, f"label_smoothing is {options.label_smoothing}.", "Give a number from 0 to 1.", rank=rank
        )
    if options.z_loss < 0.0:
        raise ShapeError(NAME, f"z_loss is {options.z_loss}.", "Give 0 or a positive factor.", rank=rank)
    if target.is_floating_point():
        _check_probabilities(options, target, rank)
    elif target.dtype not in _INDEX_DTYPES:
        remedy = "Give int64 for classes, or floats for class probabilities."
        raise ShapeError(NAME, f"target is {target.dtype}.", remedy, rank=rank)


def _check_probabilities(options: LossOptions, target: torch.Tensor, rank: int) -> None:
    if options.ignore_index >= 0:
        raise ShapeError(
            NAME,
            f"ignore_index={options.ignore_index} is given with class probabilities.",
            "Leave it out, and set the probabilities of rows without a target to 0.",
            rank=rank,
        )
    if target.requires_grad:
        raise ShapeError(
            NAME, "the target requires a gradient, which is not computed.", "Give target.detach().", rank=rank
        )


def check_part(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, vocab_size: int, group: ProcessGroup
) -> None:
    """Raise ShapeError for tensors that don't fit this rank's place in the group; logits (..., own classes)."""
    rank = group.world.rank
    if not logits.is_floating_point() or not logits.dim():
        problem = f"logits are {logits.dtype} of shape {tuple(logits.shape)}."
        raise ShapeError(NAME, problem, "Give floats, with the classes along the last dim.", rank=rank)
    num_own = piece(vocab_size, group.group_size, group.group_rank)[0]
    if logits.shape[-1] != num_own:
        raise ShapeError(
            NAME,
            f"logits have {logits.shape[-1]} classes here; this rank's part of {vocab_size} is {num_own}.",
            "Cut the classes as torch.chunk does, and give the vocab_size of all parts together.",
            rank=rank,
            where=f"group rank {group.group_rank} of {group.group_size}",
        )
    batch = tuple(logits.shape[:-1])
    fitting: Sequence[tuple[int, ...]] = (batch,)
    if target.is_floating_point():
        fitting = ((*batch, num_own), (*batch, vocab_size))
    if tuple(target.shape) not in fitting or target.device != logits.device:
        raise ShapeError(
            NAME,
            f"target has shape {tuple(target.shape)} on {target.device}, logits {tuple(logits.shape)}.",
            f"Give a target of shape {' or '.join(map(str, dict.fromkeys(fitting)))} on {logits.device}.",
            rank=rank,
        )
    if weight is not None and (tuple(weight.shape) != (vocab_size,) or weight.device != logits.device):
        raise ShapeError(
            NAME,
            f"weight has shape {tuple(weight.shape)} on {weight.device}.",
            f"Give the weights of all {vocab_size} classes, on {logits.device}, on every rank.",
            rank=rank,
        )
