"""The loss of a linear layer's logits, and the gradients of its input and parameters, block by block of logits.

One multiplication makes a block of logits; their statistics and gradient are those of `cross_entropy/pieces.py`. For a
sum of losses, the gradient of the logits follows at once, in the block's own memory, and two more multiplications add
to the gradients, so that nothing is computed again for backward. If the classes are cut into blocks too, each block is
computed twice, since softmax needs the sum over all classes before any gradient. For the statistics, a block of classes
is the same as a rank's part of the classes.

Sources: Hsu et al., "Liger Kernel" (arXiv 2410.10989), for gradients within forward; Wijmans et al., "Cut Your Losses
in Large-Vocabulary Language Models" (2411.09009), for blocks of classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from disttrain.kernels.choice import wide_dtype
from disttrain.kernels.cross_entropy.pieces import LossTerms, kernels_for
from disttrain.kernels.cross_entropy.plan import Blocks, terms_of
from disttrain.process_group import ProcessGroup, all_gather_into_tensor


class Layer(NamedTuple):
    """The tensors of the logits: hidden (rows, D), weight (own classes, D), bias (own classes,)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class Goal(NamedTuple):
    """The tensors that the logits are compared with: target (rows,), int64; class_weight (classes,), wide; a group that
    cuts classes."""

    target: torch.Tensor
    class_weight: torch.Tensor | None
    terms: LossTerms
    group: ProcessGroup | None


class Wanted(NamedTuple):
    """Flags of the gradients that are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Sums:
    """The gradients that are wanted, to which blocks add; one that is added to often is wide."""

    def __init__(self, layer: Layer, blocks: Blocks, wanted: Wanted) -> None:
        hidden, weight, bias = layer
        self.hidden = _sum_like(hidden, blocks.cuts_columns) if wanted.hidden else None
        self.weight = _sum_like(weight, blocks.cuts_rows) if wanted.weight else None
        if self.weight is not None and not blocks.num_rows:
            self.weight.zero_()
        self.bias = None
        if bias is not None and wanted.bias:
            self.bias = torch.zeros_like(bias, dtype=wide_dtype(bias.dtype))

    def add(self, layer: Layer, grad: torch.Tensor, rows: slice, columns: slice) -> None:
        """`grad` (rows, columns) is that of the block's logits; blocks come by rows, then columns, each once."""
        if self.hidden is not None:
            _add_product(self.hidden[rows], grad, layer.weight[columns], columns.start == 0)
        if self.weight is not None:
            _add_product(self.weight[columns], grad.t(), layer.hidden[rows], rows.start == 0)
        if self.bias is not None:
            self.bias[columns] += grad.sum(0, dtype=self.bias.dtype)


def losses_of(layer: Layer, goal: Goal, blocks: Blocks, sums: Sums | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row and the log of its sum of exponentials, wide; to `sums`, gradients of the losses' sum."""
    num_rows, num_own = layer.hidden.shape[0], layer.weight.shape[0]
    losses, log_sums = (layer.hidden.new_empty(num_rows, dtype=wide_dtype(layer.hidden.dtype)) for _ in range(2))
    unit = torch.ones((), dtype=losses.dtype, device=losses.device)
    buffer = _buffer(layer, blocks)
    for rows in blocks.of_rows():
        target = goal.target[rows]
        logits, statistics = buffer, []
        for columns in blocks.of_columns(num_own):
            logits = _logits(layer, rows, columns, buffer)
            terms = terms_of(goal.terms, columns)
            statistics.append(kernels_for(logits).statistics_of_classes(logits, target, goal.class_weight, terms))
        combined = kernels_for(losses.unsqueeze(1)).combined_of_classes
        of_blocks = _of_all(torch.stack(statistics), goal.group)
        losses[rows], log_sums[rows] = combined(of_blocks, target, goal.class_weight, goal.terms)
        if sums is not None:
            each = unit.expand(target.shape[0])
            for columns in blocks.of_columns(num_own):
                if blocks.cuts_columns:
                    logits = _logits(layer, rows, columns, buffer)
                _add_gradient(layer, goal, logits, log_sums, each, rows, columns, sums)
    return losses, log_sums


def add_gradients(
    layer: Layer, goal: Goal, blocks: Blocks, log_sums: torch.Tensor, grad_rows: torch.Tensor, sums: Sums
) -> None:
    """The same gradients where each row's loss has one of its own, `grad_rows` (rows,), known only in backward."""
    buffer = _buffer(layer, blocks)
    for rows in blocks.of_rows():
        for columns in blocks.of_columns(layer.weight.shape[0]):
            logits = _logits(layer, rows, columns, buffer)
            _add_gradient(layer, goal, logits, log_sums, grad_rows[rows], rows, columns, sums)


def _add_gradient(
    layer: Layer,
    goal: Goal,
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    grad_rows: torch.Tensor,
    rows: slice,
    columns: slice,
    sums: Sums,
) -> None:
    terms = terms_of(goal.terms, columns)
    grad = kernels_for(logits).gradient_of_classes(
        logits, log_sums[rows], goal.target[rows], grad_rows, goal.class_weight, terms, out=logits
    )
    sums.add(layer, grad, rows, columns)


def _buffer(layer: Layer, blocks: Blocks) -> torch.Tensor:
    """Memory for the largest block."""
    return layer.hidden.new_empty(min(blocks.rows, blocks.num_rows) * min(blocks.columns, layer.weight.shape[0]))


def _logits(layer: Layer, rows: slice, columns: slice, buffer: torch.Tensor) -> torch.Tensor:
    hidden, weight = layer.hidden[rows], layer.weight[columns]
    out = buffer[: hidden.shape[0] * weight.shape[0]].view(hidden.shape[0], weight.shape[0])
    if layer.bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(layer.bias[columns], hidden, weight.t(), out=out)


def _of_all(statistics: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """(blocks of classes, of all ranks, statistics, rows)"""
    if group is None or group.group_size == 1:
        return statistics
    of_ranks = statistics.new_empty((group.group_size * statistics.shape[0], *statistics.shape[1:]))
    all_gather_into_tensor(of_ranks, statistics, group=group)
    return of_ranks


def _sum_like(values: torch.Tensor, has_several_terms: bool) -> torch.Tensor:
    # Not yet divided by the number of tokens, a sum over them may be too large for fp16.
    is_wide = has_several_terms or values.dtype is torch.float16
    return torch.empty_like(values, dtype=wide_dtype(values.dtype) if is_wide else values.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, is_first: bool) -> None:
    """total += a @ b, or what was in `total` is overwritten; its dtype may be wider."""
    beta = 0 if is_first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda:
        # The multiplication sums in fp32 anyway; here it doesn't round at the end.
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    elif is_first:
        total.copy_(a.mm(b))
    else:
        total.add_(a.mm(b))
