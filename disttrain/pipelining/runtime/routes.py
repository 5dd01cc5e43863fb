"""Connections between the stages of all ranks, from what each rank tells the others before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule, Wiring

Value = tuple[int, int]
"""An output of a stage: the stage, and the index of the tensor."""

_OPERATION = "pipelining.step"


@dataclass(frozen=True)
class StageFacts:
    """Facts about one stage that the other ranks must know."""

    stage: int
    num_stages: int
    inputs: tuple[Value, ...] | None
    tied: tuple[tuple[str, str], ...]
    """Labels of its tied weights, and what these are like."""


@dataclass(frozen=True)
class RankFacts:
    """Facts about one rank that the others should know alike. `plan` names all else on which they must agree; `problem`
    is what the rank has found wrong by itself."""

    stages: tuple[StageFacts, ...]
    plan: Mapping[str, Any]
    problem: str = ""

    def packed(self) -> Any:
        """As plain values."""
        stages = [(facts.stage, facts.num_stages, facts.inputs, facts.tied) for facts in self.stages]
        return (stages, dict(self.plan), self.problem)

    @classmethod
    def unpacked(cls, value: Any) -> RankFacts:
        """The inverse."""
        stages, plan, problem = value
        return cls(tuple(StageFacts(*stage) for stage in stages), plan, problem)


class Hop(NamedTuple):
    """The other end of what a stage gives or takes: `numbers` of its tensors, None being all, on this rank or not."""

    stage: int
    numbers: tuple[int, ...] | None
    is_here: bool


@dataclass(frozen=True)
class Routes:
    """The stages that give values to each stage, and those that take them.

    `inputs`: of each stage, the values that it takes; None: all that the one before returns. `labels`: by pair of
    stages, the tied weights of which one tells the other its gradient.
    """

    inputs: tuple[tuple[Value, ...] | None, ...]
    labels: Mapping[tuple[int, int], tuple[str, ...]]
    wiring: Wiring

    def taken(self, source: int, target: int) -> tuple[int, ...] | None:
        """Returns the tensors of `source` that go to `target`; None: all of them."""
        inputs = self.inputs[target]
        if inputs is None:
            return None
        return tuple(sorted({which for stage, which in inputs if stage == source}))

    def givers(self, schedule: Schedule) -> list[list[Hop]]:
        """Of each stage, those that it takes something from."""
        home = schedule.placement.ranks
        return [
            [Hop(source, self.taken(source, stage), home[source] == home[stage]) for source in sources]
            for stage, sources in enumerate(schedule.sources)
        ]

    def takers(self, schedule: Schedule) -> list[list[Hop]]:
        """Of each stage, those that take something from it."""
        home = schedule.placement.ranks
        return [
            [Hop(target, self.taken(stage, target), home[target] == home[stage]) for target in targets]
            for stage, targets in enumerate(schedule.targets)
        ]

    def first_with(self, label: str) -> int:
        """The first stage that has this tied weight."""
        return min(source for (source, _), labels in self.labels.items() if label in labels)


def agree(ranks: Sequence[RankFacts], placement: Placement) -> Routes:
    """Raises: ScheduleError, the same on all ranks, when they do not fit together."""
    for rank, fact in enumerate(ranks):
        if fact.problem:
            raise ScheduleError(_OPERATION, f"{fact.problem}, on rank {rank} of the pipeline.", "Let them share one.")
    _agree_on_plan(ranks)
    facts = _by_stage(ranks, placement)
    ties = _ties(facts)
    skips = {(source, fact.stage) for fact in facts for source, _ in fact.inputs or () if source < fact.stage - 1}
    labels: dict[tuple[int, int], tuple[str, ...]] = {}
    for label, stages in sorted(ties.items()):
        for pair in ((source, target) for source in stages for target in stages if source != target):
            labels[pair] = (*labels.get(pair, ()), label)
    return Routes(
        tuple(fact.inputs for fact in facts),
        labels,
        Wiring(tuple(sorted(skips)), tuple(sorted(set(ties.values())))),
    )


def _agree_on_plan(ranks: Sequence[RankFacts]) -> None:
    for name, value in ranks[0].plan.items():
        for rank, facts in enumerate(ranks):
            if facts.plan.get(name) != value:
                raise ScheduleError(
                    _OPERATION,
                    f"{name} is {value} on rank 0 of the pipeline, and {facts.plan.get(name)} on rank {rank}.",
                    "Give all ranks the same.",
                )


def _by_stage(ranks: Sequence[RankFacts], placement: Placement) -> list[StageFacts]:
    by_stage: dict[int, StageFacts] = {}
    for rank, facts in enumerate(ranks):
        stages = sorted(fact.stage for fact in facts.stages)
        wanted = list(placement.stages[rank])
        if stages != wanted or any(fact.num_stages != placement.num_stages for fact in facts.stages):
            counts = sorted({fact.num_stages for fact in facts.stages})
            raise ScheduleError(
                _OPERATION,
                f"rank {rank} of the pipeline has stages {stages} of {' and '.join(map(str, counts))}; the schedule "
                f"has {placement.num_stages}, placed as {placement.ranks}, so it should have {wanted}.",
                "Make each stage on the rank that runs it.",
            )
        by_stage.update((fact.stage, fact) for fact in facts.stages)
    return [by_stage[stage] for stage in range(placement.num_stages)]


def _ties(facts: Sequence[StageFacts]) -> dict[str, tuple[int, ...]]:
    ties: dict[str, tuple[int, ...]] = {}
    forms: dict[str, str] = {}
    for fact in facts:
        for label, form in fact.tied:
            ties[label] = (*ties.get(label, ()), fact.stage)
            if forms.setdefault(label, form) != form:
                raise ScheduleError(
                    _OPERATION,
                    f"the tied weight {label!r} is {forms[label]} on stage {ties[label][0]}, and {form} on stage "
                    f"{fact.stage}.",
                    "Tie what is alike.",
                )
    for label, stages in ties.items():
        if len(stages) < 2:
            raise ScheduleError(
                _OPERATION,
                f"{label!r} is a tied weight of stage {stages[0]} alone.",
                "Give the same label to the other stages that have this weight.",
            )
    return ties
