"""Cuts the positions of a sequence into parts, one for each rank, of equal work under a rule. Pure.

| cut         | a rank has                                                  | equal work where               |
| ----------- | ----------------------------------------------------------- | ------------------------------ |
| contiguous  | one run of positions                                        | all see all, or a window       |
| mirrored    | the r-th run of 2 n from the front, and the r-th from behind | each sees those before         |
| by_document | two mirrored runs of each document                          | each sees those before in its own |
| by_window   | one run of where windows are full, mirrored ones elsewhere  | each sees those in a wide window |

Sources: Brandon et al., "Striped Attention" (arXiv 2311.09431) for unequal work under causal masks; Llama Team, "The
Llama 3 Herd of Models" (2407.21783), section 3.3.2, for two mirrored chunks; NVIDIA, Transformer Engine's documentation
of context parallelism, for chunks of each document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Parts:
    """The positions of a sequence that each rank has: `ranges` of each, in growing order, none empty.

    A rank holds its positions in this order, along the dim that is cut.
    """

    length: int
    ranges: tuple[tuple[range, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranges)

    def size(self, rank: int) -> int:
        """Number of positions of a rank."""
        return sum(map(len, self.ranges[rank]))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions of each rank."""
        return tuple(self.size(rank) for rank in range(self.num_ranks))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The positions of a rank, (size,) int64."""
        return positions_of(self.ranges[rank], device)

    def take(self, whole: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        """The part of `whole` that a rank has: a view where that is one run, else a copy."""
        runs = [whole.narrow(dim, run.start, len(run)) for run in self.ranges[rank]]
        if len(runs) == 1:
            return runs[0]
        return torch.cat(runs, dim) if runs else whole.narrow(dim, 0, 0)

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole, of all ranks' parts."""
        return torch.cat([*parts], dim).index_select(dim, self.order_of_joined(parts[0].device))

    def order_of_joined(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Where each position is, when the parts lie one behind the other in the order of ranks; (length,)."""
        joined = torch.cat([self.positions(rank, device) for rank in range(self.num_ranks)])
        return torch.empty_like(joined).scatter_(0, joined, torch.arange(len(joined), device=device))

    def local_index(self, rank: int, position: int) -> int:
        """Where the rank holds a position that is in one of its ranges."""
        ranges = self.ranges[rank]
        number = bisect_right([run.start for run in ranges], position) - 1
        return sum(map(len, ranges[:number])) + position - ranges[number].start

    def __str__(self) -> str:
        lines = [f"{self.length} positions on {self.num_ranks} ranks"]
        for rank, ranges in enumerate(self.ranges):
            shown = ", ".join(f"{run.start}-{run.stop - 1}" for run in ranges[:_MOST_SHOWN])
            rest = f" and {len(ranges) - _MOST_SHOWN} more runs" if len(ranges) > _MOST_SHOWN else ""
            lines.append(f"  rank {rank}: {shown or 'none'}{rest}")
        return "\n".join(lines)


_MOST_SHOWN = 4


def positions_of(ranges: Sequence[range], device: torch.device | str = "cpu") -> torch.Tensor:
    """All positions of some ranges, one behind the other, as int64."""
    if not ranges:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(run.start, run.stop, run.step, device=device) for run in ranges])


def contiguous(length: int, num_ranks: int) -> Parts:
    """One run a rank, of sizes that differ by one at most."""
    bounds = _bounds(0, length, num_ranks)
    return Parts(length, tuple(_joined([range(*pair)]) for pair in pairwise(bounds)))


def mirrored(length: int, num_ranks: int) -> Parts:
    """Rank r has the r-th of 2 n runs from the front and the r-th from behind: of the first, whose queries see few keys
    where each sees those before, and of the last, whose queries see many."""
    return by_document([length], num_ranks)


def by_document(lengths: Sequence[int], num_ranks: int) -> Parts:
    """Mirrored runs of each document, of documents of these lengths one behind the other."""
    return by_piece([Piece(length, is_flat=False) for length in lengths], num_ranks)


class Piece(NamedTuple):
    """A run of positions over which the number of keys that a query sees stays, or grows or falls evenly."""

    length: int
    is_flat: bool


def by_window(lengths: Sequence[int], num_ranks: int, size: int, *, is_causal: bool) -> Parts:
    """One run a rank of the positions of each document whose window is full, mirrored runs of the others.

    The window of a position near the ends of a document reaches beyond them, the less the farther it is from there.
    """
    pieces = []
    for length in lengths:
        ramp = min(size, length) if is_causal else min(size, max(0, length - size))
        pieces += [Piece(ramp, is_flat=False), Piece(length - ramp * (1 if is_causal else 2), is_flat=True)]
        if not is_causal:
            pieces.append(Piece(ramp, is_flat=False))
    return by_piece(pieces, num_ranks)


def by_piece(pieces: Sequence[Piece], num_ranks: int) -> Parts:
    """One run of each flat piece, two mirrored runs of each of the others, of pieces that lie one behind the other.

    What does not divide evenly goes to the ranks that have fewest positions so far, so that they differ by two at most.
    """
    ranges: list[list[range]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    start = 0
    for length, is_flat in pieces:
        owners = [*range(num_ranks)] if is_flat else [*range(num_ranks), *reversed(range(num_ranks))]
        each, rest = divmod(length, len(owners))
        chunks = [each] * len(owners)
        # A rank may get one more in each of its chunks: in that of its rank, then in its mirror image.
        fewest_first = sorted(range(num_ranks), key=lambda rank: (sizes[rank], rank))
        for number in range(rest):
            rank = fewest_first[number % num_ranks]
            chunks[rank if number < num_ranks else 2 * num_ranks - 1 - rank] += 1
        for rank, size in zip(owners, chunks, strict=True):
            ranges[rank].append(range(start, start + size))
            sizes[rank] += size
            start += size
    return Parts(start, tuple(_joined(runs) for runs in ranges))


def _bounds(start: int, length: int, num_pieces: int) -> list[int]:
    return [start + number * length // num_pieces for number in range(num_pieces + 1)]


def _joined(runs: Sequence[range]) -> tuple[range, ...]:
    """The same without empty runs, those that meet as one."""
    joined: list[range] = []
    for run in runs:
        if not run:
            continue
        if joined and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)
