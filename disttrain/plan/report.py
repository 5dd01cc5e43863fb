"""Prints the result of a search, as text for people and as one object for programs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from disttrain.console import short, table
from disttrain.plan.command import command_of, steps_to_run, unsaid
from disttrain.plan.job import Job
from disttrain.plan.reasons import why_first, why_not_first
from disttrain.plan.search import Misfit, Plan, Plans
from disttrain.plan.time.stage_times import HOST_BLOCK_S, HOST_COMPILED_BLOCK_S
from disttrain.plan.time.times import HOST_SHARDING_S, HOST_STEP_S, times_of
from disttrain.plan.time.traffic import Traffic

_INDENT = "  "
_NUMBER = re.compile(r"\d+")


def as_text(plans: Plans, model: str) -> str:
    """Args: model  as it was given, for the command line."""
    blocks = [_title(plans), *_assumed(plans.job), *_host(plans), _table(plans)]
    if plans.plans:
        first = plans.plans[0]
        blocks.append(_listed("why the first one:", why_first(plans)))
        others = (f"{plan.choice.mesh}: {why_not_first(plan, first)}" for plan in plans.plans[1:])
        if len(plans.plans) > 1:
            blocks.append(_listed("why not the others:", others))
        blocks.append(_details(plans.job, first))
        without = f" (the example has no flag for {' and '.join(unsaid(plans.job))})" if unsaid(plans.job) else ""
        blocks.append(_listed(f"to run it{without}:", steps_to_run(plans.job, first.choice, model)))
    if plans.why_nothing:
        blocks.append(_listed("why not, and what would fit:", plans.why_nothing))
    if plans.misfits:
        blocks.append(_listed("what does not fit, at its leanest:", map(_misfit, plans.misfits)))
    if plans.refused:
        counted = (f"{rule}: {count} {'mesh' if count == 1 else 'meshes'}" for rule, count in _alike(plans.refused))
        blocks.append(_listed("what cannot be:", counted))
    return "\n\n".join(blocks)


def _title(plans: Plans) -> str:
    job, sizes, hardware = plans.job, plans.job.sizes, plans.job.hardware
    nodes = math.ceil(job.num_gpus / job.node_size)
    where = f"{job.num_gpus} x {hardware.name}" + (f" on {nodes} nodes" if nodes > 1 else "")
    best_of = f"; the best of {plans.num_choices} choices" if plans.plans else ""
    active = "" if sizes.experts is None else f", {short(sizes.num_active)} of them active,"
    return (
        f"{short(sizes.num_parameters)} parameters{active} on {where}: {job.num_sequences} sequences of {job.seq_size} "
        f"tokens a step, {job.usable_bytes / 2**30:.1f} GiB of {hardware.memory_gib:g} for tensors{best_of}"
    )


def _assumed(job: Job) -> Iterator[str]:
    """Yields a line on how tokens are taken to meet experts, where there are some."""
    experts, assumed = job.sizes.experts, job.assumed
    if experts is None:
        return
    itemsize = assumed.exchange_bytes or job.precision.compute_bytes
    rows = "once to each host that has some of its experts" if assumed.once_per_host else "once for each of its experts"
    yield (
        f"{experts.num_experts} experts, {experts.top_k} of them for a token. Assumed: the rank with most rows has "
        f"{assumed.imbalance:g} times the mean (--imbalance); along ep a token goes {rows} (--once-per-host), "
        f"{itemsize} bytes an element (--exchange-bytes); {assumed.hidden:.0%} of that time is hidden "
        "(--hidden-exchange)."
    )


def _host(plans: Plans) -> Iterator[str]:
    """Yields a line on the host's launches, where a GPU waits for them, or would."""
    if not plans.plans:
        return
    first = plans.plans[0]
    one_by_one = times_of(replace(plans.job, captures=False), first.choice)
    if not one_by_one.host:
        return
    compiled = HOST_COMPILED_BLOCK_S + HOST_SHARDING_S * plans.job.precision.is_sharded
    told = f"Assumed of a host that launches kernels one by one: {1e3 * HOST_BLOCK_S:g} ms for a block's forward"
    told += f", {1e3 * compiled:.2g} ms if it is compiled, twice that for its backward, {1e3 * HOST_STEP_S:g} ms a step"
    told += " besides. "
    saved = f"the first plan's step would take {_seconds(one_by_one.step_s)}"
    captured = f"Steps are captured, and are one launch each (--capture); without, {saved}."
    yield told + (captured if plans.job.captures else "Captured steps are one launch each (--capture).")


_HEAD = (
    "",
    "mesh",
    "schedule",
    "microbatches",
    "with",
    "GiB",
    "step",
    "tokens/s/GPU",
    "MFU",
    "bubble",
    "sent",
    "of it out",
)


def _table(plans: Plans) -> str:
    if not plans.plans:
        return "Nothing fits."
    rows = [_row(number, plan, plans.job) for number, plan in enumerate(plans.plans, 1)]
    return table(_HEAD, rows, words=(1, 2, 3, 4))


def _row(number: int, plan: Plan, job: Job) -> tuple[str, ...]:
    choice, times = plan.choice, plan.times
    extras = {"recompute": choice.recomputes, "compile": choice.is_compiled}
    extras |= {"reduce each": choice.reduces_each}
    extras |= {"kernels": job.has_kernels, "float8": job.uses_float8}
    return (
        str(number),
        str(choice.mesh),
        choice.schedule_words,
        f"{choice.num_microbatches} x {choice.microbatch_size}",
        "+".join(name for name, is_on in extras.items() if is_on) or "-",
        _gib(plan.memory.total_bytes),
        _seconds(times.step_s),
        f"{plan.tokens_per_s_gpu(job):.0f}",
        f"{plan.utilization(job):.1%}",
        f"{times.bubble / times.step_s:.1%}",
        _gib(sum(traffic.sent_bytes for traffic in plan.traffic)),
        _gib(sum(traffic.between_bytes for traffic in plan.traffic)),
    )


def _details(job: Job, plan: Plan) -> str:
    """Of one plan: memory, time and wire, a line for each part."""
    memory, times = plan.memory, plan.times
    rows = [
        (name, f"{_gib(size)} GiB", f"{size / memory.total_bytes:.1%}") for name, size in memory.by_part.items() if size
    ]
    rows.append(
        ("all of it", f"{_gib(memory.total_bytes)} GiB", f"{memory.total_bytes / job.usable_bytes:.1%} of room")
    )
    rows += [(name, _seconds(s), f"{s / times.step_s:.1%}") for name, s in times.by_part.items() if s]
    for traffic in plan.traffic:
        rows.append(_wire(traffic))
        if traffic.form:
            rows.append((f"{_INDENT}{traffic.form}", "", ""))
    return table(("the first one's parts", "", ""), rows, words=(0,))


def _wire(traffic: Traffic) -> tuple[str, str, str]:
    where = f", {traffic.between_share:.0%} of it out of the node" if traffic.between_share else ""
    return (
        f"sent along {traffic.axis}{where}",
        f"{_gib(traffic.sent_bytes)} GiB",
        f"{traffic.num_calls} calls{_collectives(traffic)} of {_micro(traffic.latency_s)} at least",
    )


def _collectives(traffic: Traffic) -> str:
    return f" ({traffic.num_collectives} collectives)" if traffic.num_collectives != traffic.num_calls else ""


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else _seconds(seconds)


def _gib(num_bytes: float) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.0f}" if gib >= 999.5 else f"{gib:.1f}" if gib >= 1 else f"{gib:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _misfit(misfit: Misfit) -> str:
    plan = misfit.plan
    size, name = max((size, name) for name, size in plan.memory.by_part.items())
    most = f"{name} {size / 2**30:.0f}"
    remedies = " or ".join(misfit.remedies)
    return f"{plan.choice}: {plan.memory.total_bytes / 2**30:.1f} GiB ({most}). It would fit with {remedies}."


def _alike(refused: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Rules of one form as one, with the least and the greatest of the numbers that differ."""
    forms: dict[str, list[tuple[list[int], int]]] = {}
    for rule, count in refused.items():
        numbers = [int(number) for number in _NUMBER.findall(rule)]
        forms.setdefault(_NUMBER.sub("{}", rule), []).append((numbers, count))
    for form, rules in forms.items():
        spans = [(min(column), max(column)) for column in zip(*(numbers for numbers, _ in rules), strict=True)]
        words = (str(low) if low == high else f"{low} to {high}" for low, high in spans)
        yield form.format(*words), sum(count for _, count in rules)


def _listed(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *(_INDENT + line for line in lines)])


def as_json(plans: Plans, model: str) -> dict[str, Any]:
    """Sizes in bytes, times in seconds."""
    job = plans.job
    return {
        "job": asdict(job),
        "plans": [_plan(job, plan, model) for plan in plans.plans],
        "misfits": [
            {**_plan(job, misfit.plan, model), "would_fit_with": list(misfit.remedies)} for misfit in plans.misfits
        ],
        "without_room": None if plans.without_room is None else _plan(job, plans.without_room, model),
        "refused": plans.refused,
        "why_nothing": list(plans.why_nothing),
    }


def _plan(job: Job, plan: Plan, model: str) -> dict[str, Any]:
    return {
        "choice": asdict(plan.choice),
        "memory_bytes": plan.memory.by_part,
        "memory_total_bytes": plan.memory.total_bytes,
        "fullest": plan.memory.when,
        "times_s": plan.times.by_part,
        "step_s": plan.times.step_s,
        "utilization": plan.utilization(job),
        "traffic": [asdict(traffic) for traffic in plan.traffic],
        "command": command_of(job, plan.choice, model),
    }
