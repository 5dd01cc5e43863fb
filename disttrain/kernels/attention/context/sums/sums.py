"""Sums of terms over runs of positions: what comes first to a place is written there, what comes later is added."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from disttrain.kernels.choice import wide_dtype


class Unwritten:
    """The places, of so many, that nothing has been written to yet. Pure."""

    def __init__(self, length: int) -> None:
        self._runs: list[range] = [range(length)] if length else []

    def take(self, run: range) -> Iterator[tuple[range, bool]]:
        """The parts of a run, in growing order, and whether they are unwritten, which ends with that."""
        start, later = run.start, []
        for unwritten in self._runs:
            first, end = max(start, unwritten.start), min(run.stop, unwritten.stop)
            if first >= end:
                later.append(unwritten)
                continue
            later += [rest for rest in (range(unwritten.start, first), range(end, unwritten.stop)) if rest]
            if start < first:
                yield range(start, first), False
            yield range(first, end), True
            start = end
        self._runs = later
        if start < run.stop:
            yield range(start, run.stop), False

    def __iter__(self) -> Iterator[range]:
        return iter(self._runs)


class Sums:
    """A sum (B, H, L, E) in fp32 or wider, at each of L positions, of terms for some of them.

    Memory that is filled with zeros first and added to later is read once more than need be, for each term.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._total = torch.empty_like(like, dtype=wide_dtype(like.dtype))
        self._unwritten = Unwritten(like.shape[2])

    def add(self, run: range, term: torch.Tensor) -> None:
        """Adds a term for the positions at these places."""
        for part, is_unwritten in self._unwritten.take(run):
            target = part_of(self._total, part)
            source = part_of(term, range(part.start - run.start, part.stop - run.start))
            if is_unwritten:
                target.copy_(source)
            else:
                target.add_(source)

    def total(self) -> torch.Tensor:
        """The sum: zero where nothing came."""
        for run in self._unwritten:
            part_of(self._total, run).zero_()
        self._unwritten = Unwritten(0)
        return self._total


def part_of(tensor: torch.Tensor, run: range) -> torch.Tensor:
    """The places of a run along the dim of positions, of (B, H, L, ...)."""
    return tensor[:, :, run.start : run.stop]
