"""Who sends which rows to whom, as a value: what the devices compute, written for people, tests and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple


@dataclass(frozen=True)
class ExpertCut:
    """Where experts lie on the ranks of an axis: contiguous, as DTensor's Shard(0) cuts a dim.

    The first ranks have `chunk` experts each, the last may have fewer, or none.
    """

    num_experts: int
    num_ranks: int

    @classmethod
    @cache
    def of(cls, num_experts: int, num_ranks: int) -> ExpertCut:
        """The one cut of these, for layers, which ask at each call."""
        return cls(num_experts, num_ranks)

    @cached_property
    def chunk(self) -> int:
        """The experts of a full rank."""
        return -(-self.num_experts // self.num_ranks)

    def num_experts_of(self, rank: int) -> int:
        return max(0, min(self.chunk, self.num_experts - rank * self.chunk))

    def experts_of(self, rank: int) -> range:
        return range(
            min(rank * self.chunk, self.num_experts),
            min((rank + 1) * self.chunk, self.num_experts),
        )

    def rank_of(self, expert: int) -> int:
        return expert // self.chunk


class Landing(NamedTuple):
    """Where one row goes: a rank, and the row of that rank's rows, which are sorted by expert and then by source."""

    rank: int
    row: int


@dataclass(frozen=True)
class ExchangePlan:
    """An exchange of rows: `counts[source][expert]` rows go from each rank to each expert.

    Each rank sends its rows sorted by expert. What comes lies in the order of the sources, and is sorted by expert
    there, so that rows of an expert lie in the order of their sources.
    """

    cut: ExpertCut
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, experts: Sequence[Sequence[int]], num_experts: int) -> ExchangePlan:
        """From the experts that each rank's assignments chose. Those that name no expert are dropped."""
        counts = []
        for chosen in experts:
            row = [0] * num_experts
            for expert in chosen:
                if 0 <= expert < num_experts:
                    row[expert] += 1
            counts.append(tuple(row))
        return cls(ExpertCut(num_experts, len(experts)), tuple(counts))

    def block(self, source: int, target: int) -> tuple[int, ...]:
        """The rows that `source` sends to `target` for each of its experts."""
        experts = self.cut.experts_of(target)
        return self.counts[source][experts.start : experts.stop]

    def sent(self, rank: int) -> list[int]:
        """Rows that `rank` sends to each rank."""
        return [sum(self.block(rank, target)) for target in range(self.cut.num_ranks)]

    def received(self, rank: int) -> list[int]:
        """Rows that `rank` receives from each rank."""
        return [sum(self.block(source, rank)) for source in range(self.cut.num_ranks)]

    def ends(self, rank: int) -> list[int]:
        """The first row after each of the rank's experts, once what came is sorted."""
        blocks = [self.block(source, rank) for source in range(self.cut.num_ranks)]
        return list(accumulate(map(sum, zip(*blocks, strict=True))))

    def landings(self, source: int) -> list[Landing]:
        """Where each row goes that `source` sends, in the order in which it sends them."""
        places = []
        for target in range(self.cut.num_ranks):
            begins = [0, *self.ends(target)]
            for position, count in enumerate(self.block(source, target)):
                before = sum(self.block(other, target)[position] for other in range(source))
                places += [Landing(target, begins[position] + before + row) for row in range(count)]
        return places

    def arrival_order(self, rank: int) -> list[int]:
        """For each of the rank's sorted rows, the row in which it has come."""
        rows = {}
        come = 0
        for source in range(self.cut.num_ranks):
            for landing in self.landings(source):
                if landing.rank == rank:
                    rows[landing.row] = come
                    come += 1
        return [rows[row] for row in range(come)]
