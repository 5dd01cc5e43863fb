"""Indices along a dim, evenly spaced: a range whose numbers may be a compiler's symbols.

A Python range asks for numbers, and a graph whose sizes have been asked for serves no others. Here sizes are compared,
each comparison a condition of the graph, and computed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class IndexRange:
    """`length` ascending indices from `start`, `step` apart."""

    start: int
    length: int
    step: int = 1

    @classmethod
    def of_slice(cls, size: int, start: int | None, end: int | None, step: int = 1) -> Self:
        """The elements that `[start:end:step]` takes of `size`; `step` is positive."""
        first = _within(size, 0 if start is None else start)
        last = _within(size, size if end is None else end)
        return cls(first, -((first - last) // step) if last > first else 0, step)

    @property
    def end(self) -> int:
        """One past the last index; there is one."""
        return self.start + (self.length - 1) * self.step + 1

    def between(self, first: int, last: int) -> IndexRange:
        """Those from the `first` up to but without the `last` of them."""
        return IndexRange(self.start + first * self.step, last - first, self.step)

    def less(self, offset: int) -> IndexRange:
        """The same indices, counted from `offset`."""
        return IndexRange(self.start - offset, self.length, self.step)

    def num_below(self, bound: int) -> int:
        """The number of them below `bound`."""
        return min(self.length, max(0, -((self.start - bound) // self.step)))


def _within(size: int, index: int) -> int:
    """An index from 0 up to `size`, where negative ones count from the end."""
    if index < 0:
        return max(0, index + size)
    return min(size, index)
