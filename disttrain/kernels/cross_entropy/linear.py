"""Cross-entropy of a linear layer's output, whose logits are never all in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from disttrain.autocast import is_within_autocast
from disttrain.dtensor import DTensor
from disttrain.errors import DisttrainError, GroupError, ShapeError
from disttrain.kernels.choice import wide_dtype
from disttrain.kernels.cross_entropy.graph import NAME, computed_losses
from disttrain.kernels.cross_entropy.pieces import LossTerms, weights_of
from disttrain.kernels.cross_entropy.plan import BLOCK_BYTES
from disttrain.mesh import DeviceMesh
from disttrain.pieces import piece
from disttrain.process_group import ProcessGroup
from disttrain.process_group._c10d import is_traced
from disttrain.process_group.functional.functions import group_of

_REDUCTIONS = ("mean", "sum", "none")


class LinearLossOptions(NamedTuple):
    """The arguments that are no tensors."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0
    block_bytes: int = BLOCK_BYTES


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    vocab_size: int | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float = 0.0,
    block_bytes: int = BLOCK_BYTES,
) -> torch.Tensor:
    """F.cross_entropy(F.linear(hidden, weight, bias), target, ...), without the logits.

    Three forms. Of plain tensors:
        hidden  (..., D);  weight  (classes, D);  bias  (classes,), all of one dtype;  target  (...), int64 or int32.
        Within autocast they are cast to its dtype, but for fp64.
    Of this rank's part of the classes, with a group:
        weight, bias  this rank's piece of `vocab_size` classes as torch.chunk cuts. All else is alike on all ranks.
        group         a process group or a mesh of one axis.
    Of DTensors hidden and weight, with neither group nor vocab_size: at most one axis of their mesh cuts the classes,
        the others may cut the batch. The target is a DTensor, or a plain tensor: this rank's part of it, cut as the
        batch is. Returns a DTensor: a sum to come (Partial) where the batch is cut, and cut as it for reduction "none".

    Args:    class_weight  (classes,), whole on every rank: a token counts by that of its target.
             ignore_index, reduction, label_smoothing  as F.cross_entropy has them.
             z_loss       times the squared logsumexp is added to each token's loss, and weighted and reduced with it.
             soft_cap     logits become soft_cap * tanh(logits / soft_cap); 0: they stay.
             block_bytes  what a block of logits may take. Larger ones are faster, up to a point.
    Returns: fp32 (fp64 of fp64).
    Raises:  ShapeError for tensors and options that don't fit, GroupError, LayoutError for DTensors that lie otherwise.
             IndexError for a target out of range on the CPU; on a GPU and in a graph that token's loss is NaN.
    Gradient: of hidden, weight and bias, once. For reductions "mean" and "sum" they are computed within forward, in
             fp32 where several blocks add up, and kept; for "none" the logits are made again in backward. Without
             gradients, as within torch.no_grad, only the loss is computed.
    Collective: every rank of the group, an all-gather of a few numbers per token for each block of rows, and in
             backward an all-reduce of hidden's gradient.
    """
    options = LinearLossOptions(ignore_index, reduction, label_smoothing, z_loss, soft_cap, block_bytes)
    if isinstance(hidden, DTensor) or isinstance(weight, DTensor):
        if group is not None or vocab_size is not None:
            problem = "DTensors are given together with a group or a vocab_size."
            raise GroupError(NAME, problem, "Leave them out: the DTensors' mesh and shapes say both.")
        # What is needed for DTensors needs this file.
        from disttrain.kernels.cross_entropy.dtensors import loss_of_dtensors

        return loss_of_dtensors(hidden, weight, target, bias, class_weight, options)
    own_group = group_of(group) if isinstance(group, DeviceMesh) else group
    if (own_group is None) != (vocab_size is None):
        problem = f"group is {group}, vocab_size {vocab_size}; classes are cut where both are given."
        raise GroupError(NAME, problem, "Give both or none.")
    losses, total_weight = loss_and_weight(
        hidden, weight, target, bias, class_weight, vocab_size, options, own_group, sums_hidden=True
    )
    return mean_of(losses, total_weight) if reduction == "mean" else losses


def mean_of(losses: torch.Tensor, total_weight: torch.Tensor) -> torch.Tensor:
    """The mean of the losses. Of no tokens it is NaN, and its gradients are zeros, as torch's."""
    is_none = total_weight == 0
    mean = losses / total_weight.masked_fill(is_none, 1.0)
    return torch.where(is_none, (losses / total_weight).detach(), mean)


def loss_and_weight(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    vocab_size: int | None,
    options: LinearLossOptions,
    group: ProcessGroup | None,
    sums_hidden: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of losses, or for reduction "none" each token's, and the sum of weights that a mean divides by.

    Args: sums_hidden  hidden's gradient is the sum of all ranks' terms, else this rank's.
    """
    if is_within_autocast(hidden.device) and hidden.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    num_classes, num_own, first_class = weight.shape[0], weight.shape[0], 0
    if group is not None and vocab_size is not None:
        num_classes = vocab_size
        num_own, first_class = piece(vocab_size, group.group_size, group.group_rank)
    rank = None if group is None else group.world.rank
    try:
        _check_options(options, rank)
        _check_tensors(hidden, weight, target, bias, class_weight, (num_own, num_classes), rank)
        _check_targets(target, num_classes, options.ignore_index)
    except (DisttrainError, IndexError) as error:
        if group is not None:
            group.refuse(NAME, error, "all_gather_into_tensor")
        raise
    wide = wide_dtype(hidden.dtype)
    wide_weight = None if class_weight is None else class_weight.detach().to(wide)
    terms = LossTerms(
        num_classes, first_class, options.ignore_index, options.label_smoothing, options.z_loss, options.soft_cap
    )
    classes = target.reshape(-1).long()
    is_summed = options.reduction != "none"
    group_name = "" if group is None else group.group_name
    rows = hidden.reshape(-1, hidden.shape[-1])
    numbers = list(map(float, terms))
    arguments = (rows, weight, bias, classes, wide_weight, numbers, group_name, options.block_bytes, sums_hidden)
    losses = computed_losses(*arguments, is_summed)
    row_weights, is_counted = weights_of(classes, wide_weight, terms), classes != options.ignore_index
    total_weight = (is_counted if row_weights is None else row_weights * is_counted).sum(dtype=wide)
    return losses if is_summed else losses.view(target.shape), total_weight


def _check_options(options: LinearLossOptions, rank: int | None) -> None:
    if options.reduction not in _REDUCTIONS:
        names = ", ".join(_REDUCTIONS)
        raise ShapeError(NAME, f"there is no reduction {options.reduction!r}.", f"Known are {names}.", rank=rank)
    if not 0.0 <= options.label_smoothing <= 1.0:
        problem = f"label_smoothing is {options.label_smoothing}."
        raise ShapeError(NAME, problem, "Give a number from 0 to 1.", rank=rank)
    for name in ("z_loss", "soft_cap", "block_bytes"):
        if getattr(options, name) < 0:
            problem = f"{name} is {getattr(options, name)}."
            raise ShapeError(NAME, problem, "Give 0 or a positive number.", rank=rank)


def _check_tensors(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    sizes: tuple[int, int],
    rank: int | None,
) -> None:
    """Raise ShapeError for what does not fit; `sizes` are the classes of this rank, and of all."""
    num_own, num_classes = sizes
    layer = [hidden, weight] if bias is None else [hidden, weight, bias]
    if not hidden.is_floating_point() or len({tensor.dtype for tensor in layer}) > 1:
        dtypes = ", ".join(str(tensor.dtype) for tensor in layer)
        raise ShapeError(
            NAME, f"the layer's dtypes are {dtypes}.", "Give floats of one dtype, or use autocast.", rank=rank
        )
    wanted = (num_own, hidden.shape[-1])
    if tuple(weight.shape) != wanted or (bias is not None and tuple(bias.shape) != wanted[:1]):
        biased = "" if bias is None else f", bias {tuple(bias.shape)}"
        problem = f"hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}{biased}."
        raise ShapeError(NAME, problem, f"Give a weight {wanted} here.", rank=rank)
    if target.shape != hidden.shape[:-1] or target.dtype not in (torch.int64, torch.int32):
        problem = f"target is {target.dtype} of shape {tuple(target.shape)}, hidden has {tuple(hidden.shape)}."
        raise ShapeError(NAME, problem, f"Give int64 of shape {tuple(hidden.shape[:-1])}.", rank=rank)
    if class_weight is not None and tuple(class_weight.shape) != (num_classes,):
        problem = f"class_weight has shape {tuple(class_weight.shape)}."
        raise ShapeError(NAME, problem, f"Give the weights of all {num_classes} classes.", rank=rank)


def _check_targets(target: torch.Tensor, num_classes: int, ignore_index: int) -> None:
    """Checks targets on the CPU, where nothing has to be waited for."""
    if target.device.type != "cpu" or is_traced():
        return
    is_wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
    if is_wrong.any():
        raise IndexError(f"a target is out of bounds: there are {num_classes} classes")
