"""What a rank computes of its part of the logits, a few rows at a time, so that wide temporaries stay small.

Logits may be half precision; statistics never are. Were all rows widened at once, that would take more memory than the
logits themselves. So one buffer of at most PIECE_ELEMENTS elements (16 MiB in fp32) goes over the rows; with class
probabilities there are two. A graph takes all rows at once: its compiler fuses what is in between away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from disttrain.process_group._c10d import is_traced

PIECE_ELEMENTS: Final = 1 << 22
"""Elements of a buffer; a single row may take more."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What statistics of logits of `dtype` are computed in."""
    return torch.promote_types(dtype, torch.float32)


def statistics_of_classes(
    logits: torch.Tensor, own: torch.Tensor, weight: torch.Tensor | None, *, sums_up: bool
) -> torch.Tensor:
    """Per row: log of the sum of exponentials, the target's logit, and where `sums_up` the weighted sum of logits.

    Args:    logits  (rows, own classes);  own  (rows,), the target counted from this rank's first class, anything for
             one of other ranks, whose logit is 0 here;  weight  (own classes,), wide.
    Returns: (2 or 3, rows), wide; of no classes the first is minus infinity.
    """
    found = logits.new_zeros((2 + sums_up, logits.shape[0]), dtype=wide_dtype(logits.dtype))
    if not logits.shape[1]:
        found[0] = float("-inf")
        return found
    is_own = (own >= 0) & (own < logits.shape[1])
    picked = logits.gather(1, own.masked_fill(~is_own, 0).unsqueeze(1)).squeeze(1).to(found.dtype)
    if is_traced():
        wide = logits.to(found.dtype)
        statistics = [wide.logsumexp(1), torch.where(is_own, picked, 0.0)]
        if sums_up:
            statistics.append((wide if weight is None else wide * weight).sum(1))
        return torch.stack(statistics)
    found[1] = picked.masked_fill_(~is_own, 0.0)
    buffer = _buffer(logits)
    for rows in _pieces(logits):
        part = logits[rows]
        out = buffer[: part.shape[0]]
        if sums_up:
            counted = part if weight is None else torch.mul(part, weight, out=out)
            found[2, rows] = counted.sum(1, dtype=found.dtype)
        found[0, rows] = _log_sum(part, out)
    return found


def gradient_of_classes(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    own: torch.Tensor,
    spread: torch.Tensor,
    at_target: torch.Tensor,
    everywhere: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """`spread * softmax(logits) - everywhere * weight`, less `at_target` in the target's column, in the logits' dtype.

    Args: log_sums, spread, at_target, everywhere  (rows,), wide;  own, weight  as for the statistics.
    """
    if is_traced():
        result = (logits - log_sums.unsqueeze(1)).exp() * spread.unsqueeze(1)
        if everywhere is not None:
            result = result - everywhere.unsqueeze(1) * (1.0 if weight is None else weight)
        columns = torch.arange(logits.shape[1], device=logits.device)
        return torch.where(columns == own.unsqueeze(1), result - at_target.unsqueeze(1), result).to(logits.dtype)
    grad = torch.empty_like(logits)
    if not logits.shape[1]:
        return grad
    is_absent = (own < 0) | (own >= logits.shape[1])
    columns = own.masked_fill(is_absent, 0).unsqueeze(1)
    taken = at_target.masked_fill(is_absent, 0.0).neg_().unsqueeze(1)
    buffer = None if grad.dtype == spread.dtype else _buffer(logits)
    for rows in _pieces(logits):
        part = logits[rows]
        out = grad[rows] if buffer is None else buffer[: part.shape[0]]
        result = torch.sub(part, log_sums[rows].unsqueeze(1), out=out).exp_().mul_(spread[rows].unsqueeze(1))
        if everywhere is not None:
            share = everywhere[rows]
            result.sub_(share.unsqueeze(1)) if weight is None else result.addr_(share, weight, alpha=-1)
        result.scatter_add_(1, columns[rows], taken[rows])
        if buffer is not None:
            grad[rows] = result
    return grad


def statistics_of_probabilities(
    logits: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor | None, smoothing: tuple[float, float]
) -> torch.Tensor:
    """Per row: log of the sum of exponentials, the sum of what is wanted, and the sum of logits times that.

    Args:    logits, wanted  (rows, own classes);  smoothing  factor and summand for `wanted`, before `weight`.
    Returns: (3, rows), wide.
    """
    found = logits.new_zeros((3, logits.shape[0]), dtype=wide_dtype(logits.dtype))
    if not logits.shape[1]:
        found[0] = float("-inf")
        return found
    if is_traced():
        part, wished = logits.to(found.dtype), _wished(wanted, weight, smoothing, found.dtype)
        return torch.stack([part.logsumexp(1), wished.sum(1), (part * wished).sum(1)])
    buffer = _buffer(logits)
    for rows in _pieces(logits):
        part = logits[rows]
        out = buffer[: part.shape[0]]
        wished = _wished(wanted[rows], weight, smoothing, found.dtype)
        found[1, rows] = wished.sum(1)
        found[2, rows] = torch.mul(part, wished, out=out).sum(1)
        found[0, rows] = _log_sum(part, out)
    return found


def gradient_of_probabilities(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    wanted: torch.Tensor,
    spread: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    smoothing: tuple[float, float],
) -> torch.Tensor:
    """`spread * softmax(logits) - scale * wanted`, smoothed and weighted as for the statistics."""
    if is_traced():
        wished = _wished(wanted, weight, smoothing, spread.dtype)
        shares = (logits - log_sums.unsqueeze(1)).exp()
        return (shares * spread.unsqueeze(1) - wished * scale.unsqueeze(1)).to(logits.dtype)
    grad = torch.empty_like(logits)
    buffer = None if grad.dtype == spread.dtype else _buffer(logits)
    for rows in _pieces(logits):
        part = logits[rows]
        out = grad[rows] if buffer is None else buffer[: part.shape[0]]
        result = torch.sub(part, log_sums[rows].unsqueeze(1), out=out).exp_().mul_(spread[rows].unsqueeze(1))
        wished = _wished(wanted[rows], weight, smoothing, spread.dtype)
        result.addcmul_(wished, scale[rows].unsqueeze(1), value=-1)
        if buffer is not None:
            grad[rows] = result
    return grad


def _pieces(logits: torch.Tensor) -> Iterator[slice]:
    num_rows = max(1, PIECE_ELEMENTS // max(1, logits.shape[1]))
    for begin in range(0, logits.shape[0], num_rows):
        yield slice(begin, begin + num_rows)


def _buffer(logits: torch.Tensor) -> torch.Tensor:
    """What the widest piece takes."""
    first = next(_pieces(logits), slice(0, 0))
    return torch.empty_like(logits[first], dtype=wide_dtype(logits.dtype))


def _log_sum(part: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """As part.logsumexp(1), wide, in `buffer`."""
    top = part.amax(1, keepdim=True).to(buffer.dtype)
    # From infinity nothing may be taken away.
    top.masked_fill_(top.isinf(), 0.0)
    return torch.sub(part, top, out=buffer).exp_().sum(1).log_().add_(top.squeeze(1))


def _wished(
    wanted: torch.Tensor, weight: torch.Tensor | None, smoothing: tuple[float, float], dtype: torch.dtype
) -> torch.Tensor:
    factor, summand = smoothing
    wished = wanted.to(dtype)
    if summand:
        wished = wished * factor + summand
    return wished if weight is None else wished * weight
