"""Every stage computes each microbatch exactly once: one F, and one B or one I with one W."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import COMPUTE, Op
from disttrain.pipelining.schedule.schedule import Schedule

F, I, W, B = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD  # noqa: E741


def check_counts(schedule: Schedule) -> Iterator[Problem]:
    seen = Counter(
        (part.op, part.stage, part.microbatch)
        for actions in schedule.ranks
        for action in actions
        if action.op in COMPUTE
        for part in action.parts
    )
    for (op, stage, microbatch), count in seen.items():
        if count > 1:
            yield _problem(
                schedule, stage, f"{stage}{op.value}{microbatch} is there {count} times.", "Keep one of them."
            )
    for stage in range(schedule.num_stages):
        yield from _of_stage(schedule, seen, stage)


def _of_stage(schedule: Schedule, seen: Counter[tuple[Op, int, int | None]], stage: int) -> Iterator[Problem]:
    """The first microbatch with something missing, and all that have something too many."""
    for microbatch in range(schedule.num_microbatches):
        kinds = tuple(op for op in (F, I, W, B) if (op, stage, microbatch) in seen)
        if kinds in (((F, B), (F, I, W)) if schedule.has_backward else ((F,),)):
            continue
        wants = "one F, and one B or one I with one W" if schedule.has_backward else "one F and no backward"
        has = ", ".join(kind.value for kind in kinds) or "nothing"
        yield _problem(
            schedule,
            stage,
            f"Stage {stage} has {has} for microbatch {microbatch}; each microbatch needs {wants}.",
            "Add what is missing, take out what is too much.",
        )
        return


def _problem(schedule: Schedule, stage: int, text: str, remedy: str) -> Problem:
    return Problem(text, remedy, schedule.placement.ranks[stage])
