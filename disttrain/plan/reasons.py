"""Why the first plan is first, what limits it, and what the others lose against it, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from disttrain.errors import ScheduleError
from disttrain.plan.job import Choice, Job
from disttrain.plan.search import Plan, Plans, plan_of

_LIMITS = {
    "compute": "computing",
    "recompute": "computing activations again",
    "tp": "activations sent between the ranks of tp",
    "cp": "keys and values sent along cp",
    "exchange": "tokens sent to their experts and back",
    "shards": "gathering parameters and reducing gradients",
    "bubble": "stages that wait for each other",
    "optimizer": "the optimizer",
    "host": "the host, which launches kernels one by one",
}
_WORTH_NAMING = 0.005
"""Of a step."""


def why_first(plans: Plans) -> Iterator[str]:
    """Sentences on the first plan."""
    job, first = plans.job, plans.plans[0]
    times, step_s = first.times.by_part, first.times.step_s
    yield f"{times['compute'] / step_s:.0%} of the step is computing that every plan has to do."
    others = sorted(((s, name) for name, s in times.items() if name != "compute"), reverse=True)
    named = [f"{_LIMITS[name]} ({s / step_s:.1%})" for s, name in others if s > _WORTH_NAMING * step_s]
    yield f"What limits it: {', '.join(named) if named else 'nothing but computing'}."
    parts = sorted(((size, name) for name, size in first.memory.by_part.items()), reverse=True)[:2]
    most = " and ".join(f"{name} ({size / 2**30:.1f} GiB)" for size, name in parts)
    yield f"Memory is fullest in {first.memory.when}, mostly {most}."
    yield from _limits_of_memory(job, first)
    other = plans.without_room
    if other is not None and other.times.step_s < (1 - _WORTH_NAMING) * step_s:
        size, name = max((size, name) for name, size in other.memory.by_part.items())
        yield (
            f"Memory forbids the fastest: {other.choice} would be {1 - other.times.step_s / step_s:.1%} faster (MFU "
            f"{other.utilization(job):.1%}), and take {other.memory.total_bytes / 2**30:.1f} GiB, of which {name} "
            f"{size / 2**30:.1f}."
        )


def _limits_of_memory(job: Job, first: Plan) -> Iterator[str]:
    """Yields choices on the same mesh that would be faster, if they fitted."""
    for words, choice in _next_steps(first.choice):
        try:
            other = plan_of(job, choice)
        except ScheduleError:
            continue
        if other.times.step_s < first.times.step_s and not other.fits(job):
            gib = other.memory.total_bytes / 2**30
            gained = 1 - other.times.step_s / first.times.step_s
            yield f"{words} it would be {gained:.1%} faster, and take {gib:.1f} GiB."


def _next_steps(choice: Choice) -> Iterator[tuple[str, Choice]]:
    if choice.recomputes:
        yield "Without recomputing", replace(choice, recomputes=False)
    if choice.reduces_each:
        yield "With gradients reduced once", replace(choice, reduces_each=False)
    if choice.num_microbatches % 2 == 0:
        larger = replace(
            choice, microbatch_size=2 * choice.microbatch_size, num_microbatches=choice.num_microbatches // 2
        )
        yield "With microbatches twice as large", larger
    if choice.schedule not in (None, "ZBVZeroBubble"):
        yield "With ZBVZeroBubble", replace(choice, schedule="ZBVZeroBubble", is_compiled=False, stages_per_rank=None)


def why_not_first(plan: Plan, first: Plan) -> str:
    """Names the parts of the step that take longer than those of the first plan."""
    longer_s = plan.times.step_s - first.times.step_s
    changes = {name: s - first.times.by_part[name] for name, s in plan.times.by_part.items()}
    share = _WORTH_NAMING * first.times.step_s
    named = sorted(((name, s) for name, s in changes.items() if abs(s) > share), key=lambda change: -change[1])
    words = ", ".join(f"{name} {1e3 * s:+.0f} ms" for name, s in named) or "no part of it stands out"
    return f"{longer_s / first.times.step_s:+.1%}: {words}"
