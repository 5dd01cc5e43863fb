"""The loss of each row of logits whose classes are cut among the ranks of a group; its gradient costs no collective.

What a softmax needs of the other ranks is one number per row: the log of their sum of exponentials. So each rank sends
two or three numbers per row (that, its share of the target's logit, and what smoothing or probabilities need), in one
all-gather, and combines what came by itself. All-reduces would take two rounds, one for the maximum and one for the
sums, to save bytes where there are few: 8 ranks with 8192 rows receive 0.5 MB each, which takes NVLink less time than
it takes to start the second collective.

For backward the logits themselves are kept, and the log of the sum of exponentials per row. No rank asks another then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch

from disttrain.kernels.cross_entropy import pieces as cross_entropy_pieces
from disttrain.kernels.cross_entropy.pieces import LossTerms, kernels_for
from disttrain.process_group import ProcessGroup, all_gather_into_tensor, functional
from disttrain.process_group._c10d import is_traced


def loss_of_classes(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    terms: LossTerms,
    group: ProcessGroup,
) -> torch.Tensor:
    """The loss of each row against the class that `target` names; 0 where it is ignored. Collective.

    Args:    logits  (rows, own classes);  target  (rows,), int64;  weight  (classes,), wide.
    Returns: (rows,), wide; NaN for a target out of range. On the CPU, outside of graphs, that raises IndexError.
    """
    loss: torch.Tensor = _OfClasses.apply(logits, target, weight, terms, group)  # type: ignore[no-untyped-call]
    return loss


def loss_of_probabilities(
    logits: torch.Tensor,
    wanted: torch.Tensor,
    weight: torch.Tensor | None,
    terms: LossTerms,
    group: ProcessGroup,
) -> torch.Tensor:
    """The loss of each row against probabilities `wanted`, (rows, own classes); else as `loss_of_classes`."""
    loss: torch.Tensor = _OfProbabilities.apply(logits, wanted, weight, terms, group)  # type: ignore[no-untyped-call]
    return loss


class _Refused(torch.autograd.Function):
    """A gradient that cannot be differentiated; it depends on what it was computed of, and says so when asked."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise NotImplementedError(
            "vocab_parallel_cross_entropy: its gradient is not differentiable. Use F.cross_entropy of DTensor logits."
        )


def _once(backward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], Any]:
    """`backward` of the first argument; the others have no gradient."""

    @wraps(backward)
    def run(ctx: Any, grad: torch.Tensor) -> Any:
        if is_traced():
            result = backward(ctx, grad)
        else:
            with torch.no_grad():
                result = backward(ctx, grad)
            if torch.is_grad_enabled():
                # torch's own once_differentiable looks at the incoming gradient alone, and forgets the logits.
                result = _Refused.apply(result, grad, ctx.saved_tensors[0])  # type: ignore[no-untyped-call]
        return result, *[None] * (len(ctx.needs_input_grad) - 1)

    return run


class _OfClasses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        terms: LossTerms,
        group: ProcessGroup,
    ) -> torch.Tensor:
        if target.device.type == "cpu" and not is_traced():
            is_wrong = ((target < 0) | (target >= terms.num_classes)) & (target != terms.ignore_index)
            if is_wrong.any():
                # All ranks of the group have the same targets, so that none waits for one that has raised.
                raise IndexError(f"a target is out of bounds: there are {terms.num_classes} classes")
        kernels = kernels_for(logits)
        of_ranks = _gathered(kernels.statistics_of_classes(logits, target, weight, terms), group)
        loss, log_sums = kernels.combined_of_classes(of_ranks, target, weight, terms)
        ctx.save_for_backward(logits, target, weight, log_sums)
        ctx.terms = terms
        return cast(torch.Tensor, loss)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        logits, target, weight, log_sums = ctx.saved_tensors
        return cast(
            torch.Tensor, kernels_for(logits).gradient_of_classes(logits, log_sums, target, grad, weight, ctx.terms)
        )


class _OfProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        wanted: torch.Tensor,
        weight: torch.Tensor | None,
        terms: LossTerms,
        group: ProcessGroup,
    ) -> torch.Tensor:
        of_ranks = _gathered(cross_entropy_pieces.statistics_of_probabilities(logits, wanted, weight, terms), group)
        log_sums, total = of_ranks[:, 0].logsumexp(0), of_ranks[:, 1].sum(0)
        loss = log_sums * total - of_ranks[:, 2].sum(0)
        if terms.z_loss:
            loss = loss + log_sums.square() * terms.z_loss
        ctx.save_for_backward(logits, wanted, weight, log_sums, total)
        ctx.terms = terms
        return loss

    @staticmethod
    @_once
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        logits, wanted, weight, log_sums, total = ctx.saved_tensors
        return cross_entropy_pieces.gradient_of_probabilities(logits, log_sums, total, wanted, grad, weight, ctx.terms)


def _gathered(local: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(ranks, statistics, rows)"""
    if group.group_size == 1:
        return local.unsqueeze(0)
    if is_traced():
        return functional.all_gather_tensor(local.unsqueeze(0), 0, group)
    of_ranks = local.new_empty((group.group_size, *local.shape))
    all_gather_into_tensor(of_ranks, local, group=group)
    return of_ranks
