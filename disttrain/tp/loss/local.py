"""The loss of this rank's part of the logits: checks, one row per token, and the weight that the mean divides by."""

from __future__ import annotations

import torch

from disttrain.errors import DisttrainError
from disttrain.kernels.choice import wide_dtype
from disttrain.kernels.cross_entropy.pieces import LossTerms, weights_of
from disttrain.pieces import piece
from disttrain.process_group import ProcessGroup
from disttrain.tp.loss.checks import NAME, LossOptions, check_options, check_part
from disttrain.tp.loss.rows import loss_of_classes, loss_of_probabilities


def loss_and_weight(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    vocab_size: int,
    options: LossOptions,
    group: ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses, in the shape of the batch, and the sum of the weights that they count by. Collective."""
    try:
        check_options(options, target, group.world.rank)
        check_part(logits, target, weight, vocab_size, group)
    except DisttrainError as error:
        group.refuse(NAME, error, "all_gather_into_tensor")
        raise
    num_own, first = piece(vocab_size, group.group_size, group.group_rank)
    terms = LossTerms(vocab_size, first, options.ignore_index, options.label_smoothing, options.z_loss)
    wide = wide_dtype(logits.dtype)
    rows = _as_rows(logits)
    wide_weight = None if weight is None else weight.detach().to(wide)
    if target.is_floating_point():
        wanted = _as_rows(target)
        if wanted.shape[1] != num_own:
            wanted = wanted.narrow(1, first, num_own)
        loss = loss_of_probabilities(rows, wanted, wide_weight, terms, group)
        total_weight = rows.new_full((), rows.shape[0], dtype=wide)
    else:
        classes = target.reshape(-1).long()
        loss = loss_of_classes(rows, classes, wide_weight, terms, group)
        row_weights = weights_of(classes, wide_weight, terms)
        is_counted = classes != options.ignore_index
        counted = is_counted if row_weights is None else row_weights * is_counted
        total_weight = counted.sum(dtype=wide)
    return loss.view(logits.shape[:-1]), total_weight


def _as_rows(values: torch.Tensor) -> torch.Tensor:
    return values.unsqueeze(0) if values.dim() == 1 else values.flatten(0, -2)
