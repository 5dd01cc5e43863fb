"""Boxes describe a part of a tensor. Pure arithmetic, and torch-free, so that a manifest can be read without torch.

A box is what a rank holds of a sharded tensor, and what a chunk on disk holds of it: an origin and a shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """The elements from `origin` on, `shape` of them per dim."""

    origin: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """The part that both boxes contain; None when that has no element."""
        starts = tuple(map(max, self.origin, other.origin))
        ends = (
            min(a + m, b + n) for a, m, b, n in zip(self.origin, self.shape, other.origin, other.shape, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def seen_from(self, origin: tuple[int, ...]) -> Box:
        """The same elements, counted from `origin`."""
        return Box(tuple(a - b for a, b in zip(self.origin, origin, strict=True)), self.shape)

    def moved_by(self, origin: tuple[int, ...]) -> Box:
        """The reverse of `seen_from`."""
        return Box(tuple(a + b for a, b in zip(self.origin, origin, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.origin, self.shape, strict=True))

    def split(self, max_elements: int) -> Iterator[Box]:
        """Boxes of at most `max_elements` each, in row-major order, cut along the first dims that can be cut."""
        if self.num_elements <= max(max_elements, 1):
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.shape) if size > 1)
        step = max(1, max_elements // (self.num_elements // self.shape[dim]))
        for start in range(0, self.shape[dim], step):
            size = min(step, self.shape[dim] - start)
            origin = (*self.origin[:dim], self.origin[dim] + start, *self.origin[dim + 1 :])
            yield from Box(origin, (*self.shape[:dim], size, *self.shape[dim + 1 :])).split(max_elements)


def spans(shape: tuple[int, ...], box: Box, max_gap: int) -> Iterator[tuple[int, int]]:
    """The ranges of a row-major tensor of `shape` that `box` covers: (start, end) in elements, ascending, covering all
    of it.

    Runs that repeat at a distance of at most `max_gap` elements come as one span, gaps and all.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    apart = next((dim for dim, stride in enumerate(strides) if stride <= max_gap), len(shape))
    # Dims from `apart` on are close together: one span from their first element to their last.
    first = sum(start * stride for start, stride in zip(box.origin[apart:], strides[apart:], strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(box.shape[apart:], strides[apart:], strict=True))
    rows = [range(start, start + size) for start, size in zip(box.origin[:apart], box.shape[:apart], strict=True)]
    for row in itertools.product(*rows):
        base = sum(index * stride for index, stride in zip(row, strides, strict=False))
        yield base + first, base + last + 1


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements `start` to `stop` of a row-major tensor of `shape`, as boxes that are each without gaps, ascending."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    row_size = math.prod(shape[1:])
    first, last = -(-start // row_size), stop // row_size  # the rows that are there as a whole
    if first > last:  # all lies within one row
        yield from _in_row(shape, last, start - last * row_size, stop - last * row_size)
        return
    if start < first * row_size:
        yield from _in_row(shape, first - 1, start - (first - 1) * row_size, row_size)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row_size)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.origin), (1, *box.shape))
