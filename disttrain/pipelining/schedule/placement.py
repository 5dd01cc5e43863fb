"""Placement of stages on ranks: a tuple, however it came about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from disttrain.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """`ranks[stage]` is the rank, within the pipeline's group, that holds the stage.

    Raises: ScheduleError unless each rank from 0 on holds a stage.
    """

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or set(self.ranks) != set(range(max(self.ranks) + 1)):
            raise ScheduleError(
                "Placement",
                f"{self.ranks} leaves a rank without a stage.",
                "Give every rank from 0 on at least one stage.",
            )

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Round after round: stage s lies on rank s % num_ranks (Megatron's interleaving, arXiv:2104.04473)."""
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def v(cls, num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """There and back: with two stages each, the first and the last one lie on rank 0 (arXiv:2401.10241)."""
        there = tuple(range(num_ranks))
        return cls(sum((there if turn % 2 == 0 else there[::-1] for turn in range(stages_per_rank)), ()))

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in ascending order."""
        return tuple(
            tuple(stage for stage, home in enumerate(self.ranks) if home == rank) for rank in range(self.num_ranks)
        )

    @property
    def kind(self) -> str:
        """`loop`, `v` or `custom`."""
        per_rank, left_over = divmod(self.num_stages, self.num_ranks)
        if not left_over and self == Placement.loop(self.num_ranks, per_rank):
            return "loop"
        if not left_over and self == Placement.v(self.num_ranks, per_rank):
            return "v"
        return "custom"
