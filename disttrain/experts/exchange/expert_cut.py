"""Which experts lie on which rank of an axis, as a value. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertCut:
    """Where experts lie on the ranks of an axis: contiguous, as DTensor's Shard(0) cuts a dim.

    The first ranks have `chunk` experts each, the last may have fewer, or none.
    """

    num_experts: int
    num_ranks: int

    @property
    def chunk(self) -> int:
        """The experts of a full rank."""
        return -(-self.num_experts // self.num_ranks)

    def experts_of(self, rank: int) -> range:
        return range(
            min(rank * self.chunk, self.num_experts),
            min((rank + 1) * self.chunk, self.num_experts),
        )
