"""Every stage computes each microbatch exactly once: one F, and one B or one I with one W."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import COMPUTE, Op
from disttrain.pipelining.schedule.schedule import Schedule

F, I, W, B = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD  # noqa: E741


def check_counts(schedule: Schedule) -> Iterator[Problem]:
    if _is_complete(schedule):
        return
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


def _is_complete(schedule: Schedule) -> bool:
    """True where nothing is to be said, found out without a count for each computation."""
    computed: defaultdict[tuple[Op, int], list[int | None]] = defaultdict(list)
    for actions in schedule.ranks:
        for action in actions:
            if action.op in COMPUTE:
                for part in action.parts:
                    computed[part.op, part.stage].append(part.microbatch)
    everything = set(range(schedule.num_microbatches))
    sets = {key: set(microbatches) for key, microbatches in computed.items()}
    if any(len(sets[key]) < len(microbatches) for key, microbatches in computed.items()):
        return False
    for stage in range(schedule.num_stages):
        forward, inputs, weights, both = (sets.get((op, stage), set()) for op in (F, I, W, B))
        is_split = inputs == weights and inputs.isdisjoint(both)
        backward = everything if schedule.has_backward else set()
        if not is_split or forward != everything or inputs | both != backward:
            return False
    return True


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
