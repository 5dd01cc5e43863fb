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
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from disttrain.process_group import ProcessGroup, all_gather_into_tensor, functional
from disttrain.process_group._c10d import is_traced
from disttrain.tp import loss_pieces


class LossTerms(NamedTuple):
    """What a loss is, but for its tensors."""

    num_classes: int
    first_class: int
    """Of this rank's part."""
    ignore_index: int
    label_smoothing: float
    z_loss: float


def loss_of_classes(
    logits: torch.Tensor,
    target: torch.Tensor,
    row_weights: torch.Tensor,
    weight: torch.Tensor | None,
    terms: LossTerms,
    group: ProcessGroup,
) -> torch.Tensor:
    """The loss of each row against the class that `target` names; 0 where it is ignored. Collective.

    Args:    logits  (rows, own classes);  target  (rows,), whole numbers;  weight  (classes,), wide;
             row_weights  (rows,), wide: the weight of each row's target.
    Returns: (rows,), wide; NaN for a target out of range. On the CPU, outside of graphs, that raises IndexError.
    """
    loss: torch.Tensor = _OfClasses.apply(logits, target, row_weights, weight, terms, group)  # type: ignore[no-untyped-call]
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
        row_weights: torch.Tensor,
        weight: torch.Tensor | None,
        terms: LossTerms,
        group: ProcessGroup,
    ) -> torch.Tensor:
        smoothing = terms.label_smoothing
        is_ignored = target == terms.ignore_index
        is_wrong = (target < 0) | (target >= terms.num_classes)
        if logits.device.type == "cpu" and not is_traced() and (is_wrong & ~is_ignored).any():
            # All ranks of the group have the same targets, so that none waits for one that has raised.
            raise IndexError(f"a target is out of bounds: there are {terms.num_classes} classes")
        own = target - terms.first_class
        part_weight = _part_of(weight, logits, terms)
        kernels = _kernels(logits)
        found = kernels.statistics_of_classes(logits, own, part_weight, sums_up=smoothing > 0)
        of_ranks = _gathered(found, group)
        log_sums, picked = of_ranks[:, 0].logsumexp(0), of_ranks[:, 1].sum(0)
        loss = (log_sums - picked) * row_weights
        total_weight: torch.Tensor | float = 0.0
        if smoothing:
            total_weight = float(terms.num_classes) if weight is None else weight.sum()
            spread_out = log_sums * total_weight - of_ranks[:, 2].sum(0)
            loss = loss * (1 - smoothing) + spread_out * (smoothing / terms.num_classes)
        if terms.z_loss:
            loss = loss + log_sums.square() * row_weights * terms.z_loss
        ctx.save_for_backward(logits, own, is_ignored, row_weights, log_sums, part_weight)
        ctx.terms, ctx.total_weight = terms, total_weight
        return loss.masked_fill(is_wrong, float("nan")).masked_fill(is_ignored, 0.0)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        logits, own, is_ignored, row_weights, log_sums, part_weight = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        # Where all rows are ignored, the mean's gradient is infinite.
        scale = grad.to(log_sums.dtype).masked_fill(is_ignored, 0.0)
        at_target = scale * row_weights * (1 - terms.label_smoothing)
        spread, everywhere = at_target, None
        if terms.label_smoothing:
            everywhere = scale * (terms.label_smoothing / terms.num_classes)
            spread = spread + everywhere * ctx.total_weight
        if terms.z_loss:
            spread = spread + scale * row_weights * log_sums * (2 * terms.z_loss)
        compute: Callable[..., torch.Tensor] = _kernels(logits).gradient_of_classes
        return compute(logits, log_sums, own, spread, at_target, everywhere, part_weight)


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
        part_weight = _part_of(weight, logits, terms)
        found = loss_pieces.statistics_of_probabilities(logits, wanted, part_weight, _smoothed(terms))
        of_ranks = _gathered(found, group)
        log_sums, total = of_ranks[:, 0].logsumexp(0), of_ranks[:, 1].sum(0)
        loss = log_sums * total - of_ranks[:, 2].sum(0)
        if terms.z_loss:
            loss = loss + log_sums.square() * terms.z_loss
        ctx.save_for_backward(logits, wanted, part_weight, log_sums, total)
        ctx.terms = terms
        return loss

    @staticmethod
    @_once
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        logits, wanted, part_weight, log_sums, total = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        scale = grad.to(log_sums.dtype)
        spread = scale * total
        if terms.z_loss:
            spread = spread + scale * log_sums * (2 * terms.z_loss)
        compute = loss_pieces.gradient_of_probabilities
        return compute(logits, log_sums, wanted, spread, scale, part_weight, _smoothed(terms))


def _smoothed(terms: LossTerms) -> tuple[float, float]:
    return 1 - terms.label_smoothing, terms.label_smoothing / terms.num_classes


def _part_of(weight: torch.Tensor | None, logits: torch.Tensor, terms: LossTerms) -> torch.Tensor | None:
    return None if weight is None else weight.narrow(0, terms.first_class, logits.shape[1])


def _gathered(found: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(ranks, statistics, rows)"""
    if group.group_size == 1:
        return found.unsqueeze(0)
    if is_traced():
        return functional.all_gather_tensor(found.unsqueeze(0), 0, group)
    of_ranks = found.new_empty((group.group_size, *found.shape))
    all_gather_into_tensor(of_ranks, found, group=group)
    return of_ranks


def _kernels(logits: torch.Tensor) -> Any:
    """Triton's kernels where they can work, else torch's."""
    is_fit = logits.is_cuda and logits.dtype is not torch.float64 and logits.numel() and logits.stride(1) == 1
    if is_traced() or not is_fit or not _has_triton():
        return loss_pieces
    # Triton is not on every machine, and slow to load.
    from disttrain.tp import loss_triton

    return loss_triton


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
