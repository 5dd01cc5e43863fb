"""The fastest choices that fit, one for each pp, tp, ep and cp; which part of the rest is replicas is chosen with it.

Best first: of each choice it is known what a step hardly takes less than; in this order choices are looked at closely,
which is dear where a pipeline is simulated, until none that is left can be among the best.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from disttrain.errors import ScheduleError
from disttrain.plan.job import Choice, Job, MeshSizes, meshes, why_not
from disttrain.plan.model.memory import Memory, has_room, memory_of, resting_bytes
from disttrain.plan.model.parts import has_any_stages
from disttrain.plan.remedies import why_nothing
from disttrain.plan.time.times import Times, likely_s, times_of
from disttrain.plan.time.traffic import Traffic, traffic_of

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "V-Half", "V-Min")
EAGER_SCHEDULES = frozenset({"ZBVZeroBubble", "V-Half", "V-Min", "ZB-H1", "ZB-H2", "InterleavedZeroBubble"})
"""Whose gradients of weights fill bubbles: compiled blocks have nothing to fill them with."""
MOST_PIPELINE_RANKS = 16
MOST_SEQUENCES = 16
"""In a microbatch; with more nothing is faster."""
MOST_STAGES = 8
"""Of each rank, in the search; with more, messages take what the bubble loses."""
_WORTH_MORE_STAGES = 0.01
"""Of a step: what a pipeline of two stages a rank waits at least, where more are looked at."""
_MOST_FACTOR = 16
_FEWEST_TOKENS = 512


@dataclass(frozen=True)
class Plan:
    """A choice with what it takes."""

    choice: Choice
    memory: Memory
    times: Times
    traffic: tuple[Traffic, ...]

    def fits(self, job: Job) -> bool:
        return self.memory.total_bytes <= job.usable_bytes

    def tokens_per_s_gpu(self, job: Job) -> float:
        return job.num_tokens / self.times.step_s / job.num_gpus

    def utilization(self, job: Job) -> float:
        """The share of the data sheet's FLOP/s that the model itself needs (MFU)."""
        needed = job.sizes.flops(job.num_tokens, job.seq_size)
        return needed / self.times.step_s / job.num_gpus / job.hardware.peak_flops


@dataclass(frozen=True)
class Misfit:
    """A mesh on which nothing fits: the choice that takes least memory, and what would make it fit."""

    plan: Plan
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class Plans:
    """The answer: `plans` best first, `misfits` by how little they lack, `refused` rules with how many meshes break
    them; where there is no plan, the cause and remedies in words; `without_room`, the fastest choice that memory
    forbids, where that is faster than the first plan."""

    job: Job
    plans: tuple[Plan, ...]
    misfits: tuple[Misfit, ...]
    refused: dict[str, int]
    num_choices: int
    why_nothing: tuple[str, ...] = ()
    without_room: Plan | None = None


def plan_of(job: Job, choice: Choice) -> Plan:
    """Raises: ScheduleError when there is no such schedule."""
    return Plan(choice, memory_of(job, choice), times_of(job, choice), traffic_of(job, choice))


def find_plans(
    job: Job, *, num_plans: int = 5, schedules: Sequence[str] = SCHEDULES, mesh: MeshSizes | None = None
) -> Plans:
    """The fastest choice that fits of each pp, tp, ep and cp, of these the fastest `num_plans`; or of `mesh` alone."""
    refused: Counter[str] = Counter()
    possible: list[MeshSizes] = []
    for candidate in meshes(job) if mesh is None else (mesh,):
        rule = why_not(job, candidate)
        if rule is None and (candidate.pp <= MOST_PIPELINE_RANKS or candidate == mesh):
            possible.append(candidate)
        elif rule is not None:
            refused[rule] += 1
    bounded: list[tuple[float, int, Choice, bool]] = []
    too_large: list[tuple[float, int, Choice]] = []
    for candidate in possible:
        for choice in choices(job, candidate, schedules):
            least_s = _least_s(job, choice)
            if least_s is None:
                continue
            if resting_bytes(job, choice) > job.usable_bytes:
                too_large.append((least_s, len(too_large), choice))
            else:
                bounded.append((least_s, len(bounded), choice, False))
    num_choices = len(bounded)
    too_large += [(least_s, len(too_large) + number, choice) for least_s, number, choice, _ in bounded]
    plans = _best(job, bounded, num_plans)
    fitting = {_kind(plan.choice.mesh) for plan in plans}
    others = [candidate for candidate in possible if _kind(candidate) not in fitting]
    misfits = _misfits(job, others, schedules, num_plans)
    why: tuple[str, ...] = ()
    if not plans and mesh is None:
        why = tuple(why_nothing(job, MOST_PIPELINE_RANKS, lambda asked, of: _has_room(asked, of, schedules)))
    without_room = _without_room(job, plans[0].times.step_s, too_large) if plans else None
    return Plans(job, plans, misfits, dict(refused), num_choices, why, without_room)


def choices(job: Job, mesh: MeshSizes, schedules: Sequence[str] = SCHEDULES) -> Iterator[Choice]:
    """Every way to run the job on a mesh."""
    num_sequences = job.num_sequences // mesh.num_batch_parts
    # Powers of two: what lies between them changes little.
    for size in (1 << power for power in range(MOST_SEQUENCES.bit_length())):
        if num_sequences % size:
            break
        for schedule, per_rank in _pipelines(job, mesh, schedules, num_sequences // size):
            is_compiled = job.may_compile and schedule not in EAGER_SCHEDULES
            num_microbatches = num_sequences // size
            may_reduce_each = schedule is None and mesh.num_shards > 1 and num_microbatches > 1
            for recomputes in (False, True):
                for reduces_each in (False, True)[: 1 + may_reduce_each]:
                    yield Choice(
                        mesh, size, num_microbatches, schedule, recomputes, is_compiled, reduces_each, per_rank
                    )


def _pipelines(
    job: Job, mesh: MeshSizes, schedules: Sequence[str], num_microbatches: int
) -> Iterator[tuple[str | None, int | None]]:
    """Yields schedules with the stages of each rank, None for what they have by themselves."""
    if mesh.pp == 1:
        yield None, None
        return
    is_worth_more = mesh.pp - 1 > _WORTH_MORE_STAGES * 2 * num_microbatches
    for schedule in schedules:
        yield schedule, None
        if is_worth_more and has_any_stages(schedule):
            yield from ((schedule, number) for number in _more_stages(job.sizes.num_layers, mesh.pp))


def _more_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """Numbers of stages for each rank, beyond two, with which all stages but the ends can be alike: the least and the
    most."""
    most_blocks = -(-num_layers // pp)
    alike = [number for number in range(3, MOST_STAGES + 1) if number * pp <= num_layers and most_blocks % number == 0]
    return tuple(sorted({alike[0], alike[-1]})) if alike else ()


def _least_s(job: Job, choice: Choice) -> float | None:
    """None: there is no such schedule."""
    try:
        return likely_s(job, choice)
    except ScheduleError:
        return None


def _best(job: Job, bounded: list[tuple[float, int, Choice, bool]], num_plans: int) -> tuple[Plan, ...]:
    """`bounded` as a heap, in which what has been looked at lies with its true time."""
    heapq.heapify(bounded)
    plans: dict[tuple[int, ...], Plan] = {}
    while bounded and len(plans) < num_plans:
        _, number, choice, is_known = heapq.heappop(bounded)
        kind = _kind(choice.mesh)
        if kind in plans:
            continue
        if is_known:
            plans[kind] = plan_of(job, choice)
        elif _fits(job, choice):
            heapq.heappush(bounded, (times_of(job, choice).step_s, number, choice, True))
    return tuple(plans.values())


def _without_room(job: Job, best_s: float, bounded: list[tuple[float, int, Choice]]) -> Plan | None:
    """The fastest choice that has no room, if it takes less time than `best_s`."""
    heapq.heapify(bounded)
    fastest: Choice | None = None
    while bounded and bounded[0][0] < best_s:
        _, _, choice = heapq.heappop(bounded)
        if not _fits(job, choice, otherwise=True) and (step_s := times_of(job, choice).step_s) < best_s:
            fastest, best_s = choice, step_s
    return None if fastest is None else plan_of(job, fastest)


def _kind(mesh: MeshSizes) -> tuple[int, ...]:
    """Of two meshes of a kind only the faster one is listed."""
    return mesh.pp, mesh.tp, mesh.ep, mesh.cp


def _fits(job: Job, choice: Choice, *, otherwise: bool = False) -> bool:
    """`otherwise`, where its schedule cannot be made for so many microbatches."""
    try:
        return has_room(job, choice)
    except ScheduleError:
        return otherwise


def leanest(job: Job, mesh: MeshSizes, schedules: Sequence[str] = SCHEDULES) -> Plan | None:
    """The choice that takes least memory on a mesh; None: no schedule can be made for it."""
    # More stages for each rank keep more activations.
    every = [choice for choice in choices(job, mesh, schedules) if choice.recomputes and not choice.stages_per_rank]
    # Sums of gradients over microbatches can be more than the activations of one large microbatch.
    lean = [choice for choice in every if choice.microbatch_size == 1 or choice.schedule is None]
    by_bytes: list[tuple[int, int, Choice]] = []
    for number, choice in enumerate(lean):
        try:
            by_bytes.append((memory_of(job, choice).total_bytes, number, choice))
        except ScheduleError:
            continue
    return plan_of(job, min(by_bytes)[2]) if by_bytes else None


def _misfits(job: Job, possible: Sequence[MeshSizes], schedules: Sequence[str], num_plans: int) -> tuple[Misfit, ...]:
    """Copies of shards take more than fewer copies do, so meshes without them stand for those that have some."""
    plans = [plan for mesh in possible if mesh.replicate == 1 and (plan := leanest(job, mesh, schedules))]
    lacking = sorted((plan for plan in plans if not plan.fits(job)), key=lambda plan: plan.memory.total_bytes)
    return tuple(Misfit(plan, tuple(_remedies(job, plan, schedules))) for plan in lacking[:num_plans])


def _remedies(job: Job, plan: Plan, schedules: Sequence[str]) -> Iterator[str]:
    """Yields changes that would make it fit, each by itself."""
    mesh, gib = plan.choice.mesh, plan.memory.total_bytes / job.memory_share / 2**30
    yield f"GPUs of {math.ceil(gib)} GiB"
    factor = 2
    while factor <= _MOST_FACTOR and job.precision.is_sharded:
        wider = replace(mesh, dp=factor * mesh.dp)
        larger = replace(job, num_gpus=factor * job.num_gpus)
        if why_not(larger, wider) is None and _has_room(larger, wider, schedules):
            yield f"dp={wider.dp} on {larger.num_gpus} GPUs"
            break
        factor *= 2
    seq_size = job.seq_size // 2
    while seq_size >= _FEWEST_TOKENS:
        shorter = replace(job, seq_size=seq_size)
        if why_not(shorter, mesh) is None and _has_room(shorter, mesh, schedules):
            yield f"sequences of {seq_size} tokens"
            break
        seq_size //= 2


def _has_room(job: Job, mesh: MeshSizes, schedules: Sequence[str]) -> bool:
    plan = leanest(job, mesh, schedules)
    return plan is not None and plan.fits(job)
