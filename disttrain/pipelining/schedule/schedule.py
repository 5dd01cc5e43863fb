"""A schedule: what each rank does, in which order. Generators make it, passes refine it, one executor runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.action import COMPUTE, MESSAGES, Action
from disttrain.pipelining.schedule.placement import Placement


@dataclass(frozen=True)
class Wiring:
    """Connections between stages beside the activations that each hands to the next.

    Args: skips  (from, to) pairs of stages, `to` at least two further;  ties  stages that share a weight, each with its
          copy: they add up their gradients after their last backward.
    Raises: ScheduleError when a skip does not skip, or a tie has fewer than two stages.
    """

    skips: tuple[tuple[int, int], ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for source, target in self.skips:
            if target < source + 2:
                raise ScheduleError(
                    "Wiring",
                    f"The skip from stage {source} to {target} does not skip a stage.",
                    "What goes to the next stage needs no mention; nothing goes backwards.",
                )
        for tie in self.ties:
            if len(set(tie)) < 2:
                raise ScheduleError(
                    "Wiring", f"The tie {tie} has fewer than two stages.", "Name the stages that share a weight."
                )

    @property
    def stages(self) -> set[int]:
        return {stage for group in (*self.skips, *self.ties) for stage in group}

    @cached_property
    def tied_pairs(self) -> tuple[tuple[int, int], ...]:
        """(from, to) for each gradient that is sent: every stage of a tie tells all others its own."""
        pairs = {(source, target) for tie in self.ties for source in tie for target in tie if source != target}
        return tuple(sorted(pairs))


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, with what one must know to judge them.

    Args: ranks  of each rank, its actions in order;  has_backward  False when activations are thrown away at once.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)
    wiring: Wiring = Wiring()
    has_backward: bool = True

    def __post_init__(self) -> None:
        if len(self.ranks) != self.placement.num_ranks:
            raise ScheduleError(
                "Schedule",
                f"{self.name} has actions for {len(self.ranks)} ranks, its placement {self.placement.num_ranks}.",
                "Give one list of actions for each rank, which may be empty.",
            )
        if beyond := sorted(stage for stage in self.wiring.stages if not 0 <= stage < self.num_stages):
            raise ScheduleError(
                "Schedule",
                f"{self.name} is wired to stage {beyond[0]}, and has {self.num_stages} stages.",
                "Count stages from 0 over all ranks.",
            )

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @cached_property
    def has_messages(self) -> bool:
        return any(action.op in MESSAGES for actions in self.ranks for action in actions)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage, the stages whose activations it takes; its gradients go back to them."""
        plain = [[stage - 1] if stage else [] for stage in range(self.num_stages)]
        for source, target in sorted(set(self.wiring.skips)):
            plain[target].append(source)
        return tuple(map(tuple, plain))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage, the stages that take its activations; gradients come back from them."""
        of_stages: list[list[int]] = [[] for _ in range(self.num_stages)]
        for target, sources in enumerate(self.sources):
            for source in sources:
                of_stages[source].append(target)
        return tuple(map(tuple, of_stages))

    def elsewhere(self, stage: int, others: Sequence[int]) -> Iterator[int]:
        """Those of `others` that lie on another rank than `stage`: only they need a message."""
        home = self.placement.ranks
        return (other for other in others if home[other] != home[stage])

    def with_ranks(self, ranks: Sequence[Sequence[Action]]) -> Schedule:
        return replace(self, ranks=tuple(map(tuple, ranks)))

    def compute_only(self) -> Schedule:
        """The same without messages, unsharding and reductions."""
        return self.with_ranks([[action for action in actions if action.op in COMPUTE] for actions in self.ranks])
