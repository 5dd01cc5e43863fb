"""Computes a rank's part of a loss from its part of the logits, a few rows at a time: wide temporaries stay small.

Logits may be half precision; statistics never are. Widening all rows at once would take more memory than the logits
themselves. So one buffer of at most PIECE_ELEMENTS elements (16 MiB in fp32) is used for a few rows at a time; with
class probabilities there are three. A graph takes all rows at once, since its compiler fuses the temporaries away.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from disttrain.kernels.choice import choose, wide_dtype
from disttrain.process_group._c10d import is_traced

PIECE_ELEMENTS: Final = 1 << 22
"""Elements of a buffer; a single row may take more."""


class LossTerms(NamedTuple):
    """The numbers of a loss."""

    num_classes: int
    first_class: int
    """Of this rank's part."""
    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float = 0.0
    """Logits become soft_cap * tanh(logits / soft_cap); 0: they stay what they are."""


def weights_of(target: torch.Tensor, weight: torch.Tensor | None, terms: LossTerms) -> torch.Tensor | None:
    """The weight of each row's target; any, of a target that is none. None where all are one."""
    return None if weight is None else weight[target.clamp(0, terms.num_classes - 1)]


def statistics_of_classes(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, terms: LossTerms
) -> torch.Tensor:
    """Per row: log of the sum of exponentials, the target's logit, and with smoothing the weighted sum of logits.

    Args:    logits  (rows, own classes);  target  (rows,), int64, of all classes; other ranks' have logit 0 here;
             weight  (classes,), wide.
    Returns: (2 or 3, rows), wide; of no classes the first is minus infinity.
    """
    sums_up = terms.label_smoothing > 0
    statistics = logits.new_zeros((2 + sums_up, logits.shape[0]), dtype=wide_dtype(logits.dtype))
    if not logits.shape[1]:
        statistics[0] = float("-inf")
        return statistics
    column, is_absent = _target_column(logits, target, terms)
    picked = _capped(logits.gather(1, column).squeeze(1).to(statistics.dtype), terms).masked_fill(is_absent, 0.0)
    part_weight = _part_of(weight, logits, terms)
    if is_traced():
        wide = _capped(logits.to(statistics.dtype), terms)
        rows_of = [wide.logsumexp(1), picked]
        if sums_up:
            rows_of.append((wide if part_weight is None else wide * part_weight).sum(1))
        return torch.stack(rows_of)
    statistics[1] = picked
    buffer = _buffer(logits)
    for rows in _pieces(logits):
        part = _capped(logits[rows], terms)
        out = buffer[: part.shape[0]]
        if sums_up:
            counted = part if part_weight is None else torch.mul(part, part_weight, out=out)
            statistics[2, rows] = counted.sum(1, dtype=statistics.dtype)
        statistics[0, rows] = _log_sum(part, out)
    return statistics


def combined_of_classes(
    of_ranks: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and the log of its sum of exponentials, from all ranks' statistics; both (rows,).

    Args: of_ranks  (ranks, 2 or 3, rows);  target, weight  as for the statistics.
    """
    log_sums = of_ranks[:, 0].logsumexp(0)
    loss = log_sums - of_ranks[:, 1].sum(0)
    row_weights = weights_of(target, weight, terms)
    if row_weights is not None:
        loss = loss * row_weights
    if terms.label_smoothing:
        total_weight = float(terms.num_classes) if weight is None else weight.sum()
        spread_out = log_sums * total_weight - of_ranks[:, 2].sum(0)
        loss = loss * (1 - terms.label_smoothing) + spread_out * (terms.label_smoothing / terms.num_classes)
    if terms.z_loss:
        squares = log_sums.square() * terms.z_loss
        loss = loss + (squares if row_weights is None else squares * row_weights)
    is_wrong = (target < 0) | (target >= terms.num_classes)
    return loss.masked_fill(is_wrong, float("nan")).masked_fill(target == terms.ignore_index, 0.0), log_sums


def gradient_of_classes(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    target: torch.Tensor,
    grad_rows: torch.Tensor,
    weight: torch.Tensor | None,
    terms: LossTerms,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of this rank's logits, in their dtype; `grad_rows` is that of the losses.

    It is written to `out`, which may be the logits.
    """
    # Where all rows are ignored, the mean's gradient is infinite.
    scale = grad_rows.masked_fill(target == terms.ignore_index, 0.0)
    row_weights = weights_of(target, weight, terms)
    weighted = scale if row_weights is None else scale * row_weights
    spread = at_target = weighted * (1 - terms.label_smoothing)
    everywhere = None
    if terms.label_smoothing:
        everywhere = scale * (terms.label_smoothing / terms.num_classes)
        spread = spread + everywhere * (float(terms.num_classes) if weight is None else weight.sum())
    if terms.z_loss:
        spread = spread + weighted * log_sums * (2 * terms.z_loss)
    part_weight = _part_of(weight, logits, terms)
    if is_traced():
        capped = _capped(logits, terms)
        result = (capped - log_sums.unsqueeze(1)).exp() * spread.unsqueeze(1)
        if everywhere is not None:
            result = result - everywhere.unsqueeze(1) * (1.0 if part_weight is None else part_weight)
        columns = torch.arange(terms.first_class, terms.first_class + logits.shape[1], device=logits.device)
        is_target = columns == target.unsqueeze(1)
        result = torch.where(is_target, result - at_target.unsqueeze(1), result)
        return (result * _slope(capped, terms) if terms.soft_cap else result).to(logits.dtype)
    grad = torch.empty_like(logits) if out is None else out
    if not logits.shape[1]:
        return grad
    column, is_absent = _target_column(logits, target, terms)
    taken = at_target.masked_fill(is_absent, 0.0).neg_().unsqueeze(1)
    buffer = None if grad.dtype == spread.dtype else _buffer(logits)
    for rows in _pieces(logits):
        part = _capped(logits[rows], terms)
        out = grad[rows] if buffer is None else buffer[: part.shape[0]]
        result = torch.sub(part, log_sums[rows].unsqueeze(1), out=out).exp_().mul_(spread[rows].unsqueeze(1))
        if everywhere is not None:
            share = everywhere[rows]
            result.sub_(share.unsqueeze(1)) if part_weight is None else result.addr_(share, part_weight, alpha=-1)
        result.scatter_add_(1, column[rows], taken[rows])
        if terms.soft_cap:
            result.mul_(_slope(part, terms))
        if buffer is not None:
            grad[rows] = result
    return grad


def statistics_of_probabilities(
    logits: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor | None, terms: LossTerms
) -> torch.Tensor:
    """Per row: log of the sum of exponentials, the sum of what is wanted, and the sum of logits times that.

    Args:    logits, wanted  (rows, own classes);  weight  (classes,), wide.
    Returns: (3, rows), wide.
    """
    statistics = logits.new_zeros((3, logits.shape[0]), dtype=wide_dtype(logits.dtype))
    if not logits.shape[1]:
        statistics[0] = float("-inf")
        return statistics
    part_weight = _part_of(weight, logits, terms)
    if is_traced():
        part, wished = logits.to(statistics.dtype), _wished(wanted, part_weight, terms, statistics.dtype)
        return torch.stack([part.logsumexp(1), wished.sum(1), (part * wished).sum(1)])
    buffer = _buffer(logits)
    for rows in _pieces(logits):
        part = logits[rows]
        out = buffer[: part.shape[0]]
        wished = _wished(wanted[rows], part_weight, terms, statistics.dtype)
        statistics[1, rows] = wished.sum(1)
        statistics[2, rows] = torch.mul(part, wished, out=out).sum(1)
        statistics[0, rows] = _log_sum(part, out)
    return statistics


def gradient_of_probabilities(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    total: torch.Tensor,
    wanted: torch.Tensor,
    grad_rows: torch.Tensor,
    weight: torch.Tensor | None,
    terms: LossTerms,
) -> torch.Tensor:
    """The gradient as in `gradient_of_classes`; `total` (rows,) is the sum of what is wanted, of all ranks."""
    spread = grad_rows * total
    if terms.z_loss:
        spread = spread + grad_rows * log_sums * (2 * terms.z_loss)
    part_weight = _part_of(weight, logits, terms)
    if is_traced():
        wished = _wished(wanted, part_weight, terms, spread.dtype)
        shares = (logits - log_sums.unsqueeze(1)).exp()
        return (shares * spread.unsqueeze(1) - wished * grad_rows.unsqueeze(1)).to(logits.dtype)
    grad = torch.empty_like(logits)
    buffer = None if grad.dtype == spread.dtype else _buffer(logits)
    for rows in _pieces(logits):
        part = logits[rows]
        out = grad[rows] if buffer is None else buffer[: part.shape[0]]
        result = torch.sub(part, log_sums[rows].unsqueeze(1), out=out).exp_().mul_(spread[rows].unsqueeze(1))
        wished = _wished(wanted[rows], part_weight, terms, spread.dtype)
        result.addcmul_(wished, grad_rows[rows].unsqueeze(1), value=-1)
        if buffer is not None:
            grad[rows] = result
    return grad


def _pieces(logits: torch.Tensor) -> Iterator[slice]:
    num_rows = max(1, PIECE_ELEMENTS // max(1, logits.shape[1]))
    for begin in range(0, logits.shape[0], num_rows):
        yield slice(begin, begin + num_rows)


def _buffer(logits: torch.Tensor) -> torch.Tensor:
    """Memory for the widest piece."""
    first = next(_pieces(logits), slice(0, 0))
    return torch.empty_like(logits[first], dtype=wide_dtype(logits.dtype))


def _capped(logits: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    if not terms.soft_cap:
        return logits
    return (logits.to(wide_dtype(logits.dtype)) / terms.soft_cap).tanh() * terms.soft_cap


def _slope(capped: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    """The derivative of capped logits by the logits."""
    return 1 - (capped / terms.soft_cap).square()


def _log_sum(part: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Computes part.logsumexp(1), wide, in `buffer`."""
    top = part.amax(1, keepdim=True).to(buffer.dtype)
    # From infinity nothing may be taken away.
    top.masked_fill_(top.isinf(), 0.0)
    return torch.sub(part, top, out=buffer).exp_().sum(1).log_().add_(top.squeeze(1))


def _wished(
    wanted: torch.Tensor, part_weight: torch.Tensor | None, terms: LossTerms, dtype: torch.dtype
) -> torch.Tensor:
    """Probabilities, smoothed and weighted."""
    wished = wanted.to(dtype)
    if terms.label_smoothing:
        wished = wished * (1 - terms.label_smoothing) + terms.label_smoothing / terms.num_classes
    return wished if part_weight is None else wished * part_weight


def _part_of(weight: torch.Tensor | None, logits: torch.Tensor, terms: LossTerms) -> torch.Tensor | None:
    return None if weight is None else weight.narrow(0, terms.first_class, logits.shape[1])


def _target_column(logits: torch.Tensor, target: torch.Tensor, terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each row's target in this part, (rows, 1), and the rows whose target is elsewhere, (rows,)."""
    local_target = target - terms.first_class
    is_absent = (local_target < 0) | (local_target >= logits.shape[1])
    return local_target.masked_fill_(is_absent, 0).unsqueeze(1), is_absent


def kernels_for(logits: torch.Tensor) -> Any:
    """Triton's functions of these names where they can work, else this module."""
    if is_traced():
        return sys.modules[__name__]
    obstacle = "" if logits.stride(1) == 1 or logits.shape[1] == 1 else "the classes don't lie side by side."
    return choose("cross_entropy", logits, obstacle, sys.modules[__name__], _load)


def _load() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.cross_entropy import triton_kernels as cross_entropy_triton

    return cross_entropy_triton
