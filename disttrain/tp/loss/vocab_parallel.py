"""Cross-entropy of logits whose classes are cut among the ranks of a group: the logits are never gathered."""

from __future__ import annotations

import torch

from disttrain.dtensor import DTensor
from disttrain.errors import GroupError, ShapeError
from disttrain.mesh import DeviceMesh
from disttrain.process_group import ProcessGroup
from disttrain.process_group.current import resolve_group
from disttrain.process_group.functional.functions import group_of
from disttrain.tp.loss.checks import NAME, LossOptions, check_kinds
from disttrain.tp.loss.dtensors import loss_of_dtensor
from disttrain.tp.loss.local import loss_and_weight


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    vocab_size: int | None = None,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """F.cross_entropy of logits that are cut along their classes, plus `z_loss` times the squared logsumexp per token.

    Two forms. Of this rank's part, with a group:
        logits  (..., own classes), this rank's piece of `vocab_size` classes as torch.chunk cuts; pieces may be uneven
                and empty. What comes before the classes, the batch, is alike on all ranks.
        target  (...), classes counted over all ranks' parts, int64 or int32; or class probabilities, floats, whole
                (..., vocab_size) or cut as the logits are. Alike on all ranks.
        group   a process group or a mesh of one axis; None is the default group.
        Returns a plain tensor, the same on all ranks.
    Of a DTensor cut along its classes by one axis of its mesh, with neither group nor vocab_size:
        logits  (C,), (N, C) or (N, C, d1, ...); other axes of the mesh may cut the other dims.
        target  a DTensor, or a plain tensor: this rank's part of it, cut as the logits' batch is.
        Returns a DTensor: replicated; where the batch is cut too, a sum to come (Partial), and cut as the batch is for
        reduction "none".

    Args:    weight  (classes,), whole on every rank: of each class; a token counts by that of its target.
             ignore_index, reduction, label_smoothing  as F.cross_entropy has them. The z-loss of a token is weighted,
             ignored and reduced as its loss is.
    Returns: fp32 for logits of fp16, bf16 and fp32, fp64 for fp64.
    Raises:  ShapeError for tensors and options that don't fit, GroupError, LayoutError for DTensors that lie otherwise.
             IndexError for a target out of range on the CPU; on a GPU, which would have to be waited for, and in a
             compiled graph, that token's loss is NaN.
    Gradient: of the logits, once, in their dtype; the loss is one value that all ranks have. Not differentiable twice.
             For backward the logits are kept as they are, and of each token its target and one number. Besides the
             gradient there are no temporaries of the logits' size. On GPUs with Triton the fused kernels need none,
             for fewer than 64 bits and classes; else they take 16 MiB at most, twice that in fp64, thrice with class
             probabilities, or a row if that is larger.
    Collective: every rank of the group, one all-gather of 2 numbers per token (3 with smoothing or probabilities), and
             one all-reduce of a number where other axes cut the batch. Backward has none.
    """
    options = LossOptions(ignore_index, reduction, label_smoothing, z_loss)
    check_kinds(logits, target, weight, options)
    if isinstance(logits, DTensor):
        if group is not None or vocab_size is not None:
            raise GroupError(
                NAME,
                "a DTensor is given together with a group or a vocab_size.",
                "Leave them out: the DTensor's mesh and shape say both.",
                rank=logits.device_mesh.get_rank(),
            )
        return loss_of_dtensor(logits, target, weight, options)
    own_group = resolve_group(NAME, group_of(group) if isinstance(group, DeviceMesh) else group)
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ShapeError(
            NAME,
            f"vocab_size is {vocab_size}; one part's {logits.shape[-1]} classes don't say how many there are.",
            "Give the number of classes of all parts together.",
            rank=own_group.world.rank,
        )
    if isinstance(target, DTensor) or isinstance(weight, DTensor):
        raise GroupError(
            NAME,
            "the logits are a plain tensor, target or weight a DTensor.",
            "Give to_local() of a replicated one, or DTensor logits.",
            rank=own_group.world.rank,
        )
    loss, total_weight = loss_and_weight(logits, target, weight, vocab_size, options, own_group)
    if reduction == "none":
        return loss
    return loss.sum() / total_weight if reduction == "mean" else loss.sum()
