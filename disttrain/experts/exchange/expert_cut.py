"""Which experts lie on which rank of an axis, as a value. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property


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
