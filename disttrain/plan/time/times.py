"""Estimates the time of a step: what stages compute, communication that nothing hides, and the bubble of the pipeline,
which the simulator plays."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache

from disttrain.pipelining.schedule.action import INPUT_GRADIENTS
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.costs import Link as PipelineLink
from disttrain.pipelining.schedule.simulator import simulate
from disttrain.pipelining.schedule.timeline import Timeline
from disttrain.plan.job import Choice, Job
from disttrain.plan.model.activations import kept_of
from disttrain.plan.model.parts import (
    elements_of,
    fewer_microbatches,
    parts_of,
    parts_of_ranks,
    schedule_of,
    tied_elements,
)
from disttrain.plan.time.links import link_of
from disttrain.plan.time.stage_times import (
    HOST_BLOCK_S,
    HOST_COMPILED_BLOCK_S,
    NCCL_SHARE,
    block_times,
    stage_times,
)
from disttrain.plan.time.traffic import ring_bytes

HOST_SHARDING_S = 0.17e-3
"""The time that `fully_shard` adds to launches of a compiled block's forward; in those of one that is not, it is."""
HOST_STEP_S = 20e-3
"""In which a host launches what is in a step besides blocks: both ends of the model, the loss and the optimizer. All
three as H100 and H200 have measured small models (`benchmarks/results`: captured_step_gpu, fsdp2_gpu); their hosts
differ by a third."""


@dataclass(frozen=True)
class Times:
    """Seconds of a step; means over the pipeline's ranks.

    Args: recompute  forwards done again;  tp, cp, exchange, shards  communication that nothing hides, of tensor and
          context parallel, of tokens and their experts, and of gathering parameters and reducing gradients;  bubble
          waiting for other stages;  host  for launches, where those of a whole step take longer than all else.
    """

    compute: float
    recompute: float
    tp: float
    cp: float
    exchange: float
    shards: float
    bubble: float
    optimizer: float
    host: float = 0.0

    @property
    def step_s(self) -> float:
        return sum(self.by_part.values())

    @property
    def by_part(self) -> dict[str, float]:
        return {part.name: getattr(self, part.name) for part in fields(self)}


def times_of(job: Job, choice: Choice) -> Times:
    """Raises: ScheduleError when there is no such schedule."""
    stages = parts_of(job, choice)
    each = [stage_times(job, choice, stage) for stage in stages]
    per_microbatch = choice.num_microbatches / choice.mesh.pp
    work_s = per_microbatch * sum(times.total_s for times in each)
    again_s = per_microbatch * sum(times.again for times in each)
    tp_s = per_microbatch * sum(times.tp for times in each)
    cp_s = per_microbatch * sum(times.cp for times in each)
    exchange_s = per_microbatch * sum(times.exchange for times in each)
    if choice.schedule is None:
        shards_s, bubble_s = _shards_s(job, choice), 0.0
    else:
        shards_s, bubble_s = _scheduled_shards_s(job, choice), makespan_s(job, choice) - work_s + _tie_s(job, choice)
    times = Times(
        compute=work_s - again_s - tp_s - cp_s - exchange_s,
        recompute=again_s,
        tp=tp_s,
        cp=cp_s,
        exchange=exchange_s,
        shards=shards_s,
        bubble=bubble_s,
        optimizer=_optimizer_s(job, choice),
    )
    return replace(times, host=max(0.0, _host_s(job, choice) - times.step_s))


def _host_s(job: Job, choice: Choice) -> float:
    """In which the host of a rank launches a step, ahead of the GPU or behind it; a captured one is one launch."""
    if job.captures:
        return 0.0
    block_s = HOST_BLOCK_S
    if choice.is_compiled:
        # A pipeline's schedule gathers once.
        is_gathered = job.precision.is_sharded and choice.schedule is None
        block_s = HOST_COMPILED_BLOCK_S + HOST_SHARDING_S * is_gathered
    launches = choice.num_microbatches * job.sizes.num_layers / choice.mesh.pp * (3 + choice.recomputes)
    return launches * block_s + HOST_STEP_S


def likely_s(job: Job, choice: Choice) -> float:
    """Returns a likely lower bound on the time of a step, without a simulation of its own: stages that are not alike
    only wait more."""
    if choice.schedule is None:
        return times_of(job, choice).step_s
    each, on_top = _even_rhythm(*choice.pipeline)
    busiest = _busiest_s(job, _beside_nothing(choice))
    filling = busiest * min(on_top, choice.num_microbatches * each)
    return choice.num_microbatches * each * busiest + filling + _optimizer_s(job, choice)


def costs_of(job: Job, choice: Choice) -> Costs:
    """Returns the costs that the simulator plays with."""
    each = [stage_times(job, choice, stage) for stage in parts_of(job, choice)]
    link = link_of(job, choice, "pp")
    return Costs(
        forward_s=tuple(times.forward for times in each),
        backward_input_s=tuple(times.backward - times.weights for times in each),
        backward_weight_s=tuple(times.weights for times in each),
        message_bytes=kept_of(job, choice).message,
        link=PipelineLink(link.latency_s, link.bytes_per_s),
    )


def timeline_of(job: Job, choice: Choice) -> Timeline:
    """Of the first microbatches, by the simulator. Raises: ScheduleError when there is no such schedule."""
    return _played(job, _beside_nothing(choice))


def _beside_nothing(choice: Choice) -> Choice:
    """Counts all ranks beside a pipeline as one kind: how they share parameters changes nothing in its timeline."""
    if choice.mesh.replicate == 1:
        return choice
    return replace(choice, mesh=replace(choice.mesh, replicate=1, dp=choice.mesh.replicate * choice.mesh.dp))


@cache
def _played(job: Job, choice: Choice) -> Timeline:
    assert choice.schedule is not None
    fewer = fewer_microbatches(choice.schedule, choice.mesh.pp, choice.num_microbatches)
    return simulate(schedule_of(choice.pipeline, fewer), costs_of(job, choice))


def makespan_s(job: Job, choice: Choice) -> float:
    """Of all microbatches: of those that are played, and for each one more what one takes once all ranks are busy."""
    timeline = timeline_of(job, choice)
    left_out = choice.num_microbatches - timeline.schedule.num_microbatches
    return timeline.makespan_s + left_out * _steady_s(timeline) if left_out else timeline.makespan_s


def _steady_s(timeline: Timeline) -> float:
    """For one microbatch more: as long as the busiest rank computes on it, or as lies between the ends of two backwards
    on the first stage, within the third of four rounds, where the schedule lets all ranks wait."""
    schedule = timeline.schedule
    num_ranks = schedule.num_ranks
    ends = {
        part.microbatch: span.end_s
        for span in timeline.compute[schedule.placement.ranks[0]]
        for part in span.action.parts
        if part.stage == 0 and part.op in INPUT_GRADIENTS
    }
    between_s = (ends[3 * num_ranks - 1] - ends[2 * num_ranks - 1]) / num_ranks
    return max(between_s, max(timeline.busy_s) / schedule.num_microbatches)


_LOOPS = {"1F1B": 1, "Interleaved1F1B": 2}
"""Schedules that wait for (ranks - 1) / (stages of a rank) microbatches, and for nothing else, with their stages."""


@cache
def _even_rhythm(name: str, num_ranks: int, stages_per_rank: int | None) -> tuple[float, float]:
    """Returns what a microbatch takes and what comes on top of all, in units of what a rank computes for one
    microbatch, where all stages are alike, and F, I and W too."""
    if name in _LOOPS:
        return 1.0, (num_ranks - 1) / (stages_per_rank or _LOOPS[name])
    schedule = schedule_of((name, num_ranks, stages_per_rank), 4 * num_ranks)
    timeline = simulate(schedule, Costs().split(schedule.num_stages // num_ranks))
    each = _steady_s(timeline) / 3
    return each, timeline.makespan_s / 3 - 4 * num_ranks * each


@cache
def _busiest_s(job: Job, choice: Choice) -> float:
    """Returns what the rank with most to do computes for each microbatch."""
    seconds = {stage: stage_times(job, choice, stage).total_s for stage in dict.fromkeys(parts_of(job, choice))}
    return max(sum(seconds[stage] for stage in stages) for stages in parts_of_ranks(job, choice))


def _tie_s(job: Job, choice: Choice) -> float:
    """After the last backward both ends tell each other the gradient of the matrix that both have."""
    num_elements = tied_elements(job, choice)
    num_bytes = num_elements * job.precision.parameter_bytes
    return link_of(job, choice, "pp").seconds(num_bytes) if num_elements else 0.0


def _optimizer_s(job: Job, choice: Choice) -> float:
    """AdamW in one launch reads and writes a parameter and two states, and reads its gradient, as clipping does."""
    elements, mesh = elements_of(job.sizes, choice.mesh.tp, choice.mesh.ep), choice.mesh
    stages = parts_of(job, choice)
    held = sum(elements.of(stage, is_tied=job.sizes.is_tied) for stage in stages) / mesh.num_shards
    held += sum(map(elements.experts_of, stages)) / mesh.num_expert_shards
    moved = held / mesh.pp * 8 * job.precision.parameter_bytes
    return moved / job.hardware.memory_bytes_per_s


@dataclass(frozen=True)
class _Num:
    """Elements of parameters that go over the wire, those of experts by themselves: other ranks share them."""

    dense: int
    experts: int = 0

    @property
    def together(self) -> int:
        return self.dense + self.experts

    def along(self, choice: Choice) -> list[tuple[str, int]]:
        """The axes along which each part is sharded, where there are others that have shards."""
        parts = [(choice.mesh.shards, self.dense), (choice.mesh.expert_shards, self.experts)]
        return [(axis, num) for axis, num in parts if choice.mesh.size(axis) > 1 and num]


def _reduction_s(job: Job, choice: Choice, num: _Num) -> float:
    """Gradients over their shards, then over copies."""
    size, mesh = job.precision.reduce_bytes, choice.mesh
    seconds = sum(
        link_of(job, choice, axis).seconds(ring_bytes(elements * size, mesh.size(axis)))
        for axis, elements in num.along(choice)
    )
    if mesh.replicate > 1:
        for elements, num_shards in ((num.dense, mesh.num_shards), (num.experts, mesh.num_expert_shards)):
            if elements:
                seconds += link_of(job, choice, "replicate").all_reduce_s(elements * size / num_shards)
    return seconds


def _packing_s(job: Job, choice: Choice, num: _Num) -> float:
    """Gradients, or their sums, into the order and dtype of their reduction; and the reduced ones, where there are some
    of microbatches before, to these."""
    precision, mesh = job.precision, choice.mesh
    if not precision.is_sharded:
        return 0.0
    sums = choice.num_microbatches > 1 and not choice.reduces_each
    moved = num.together * ((precision.reduce_bytes if sums else precision.compute_bytes) + precision.reduce_bytes)
    if choice.num_reductions > 1:
        moved += 3 * precision.parameter_bytes * (num.dense // mesh.num_shards + num.experts // mesh.num_expert_shards)
    return moved / job.hardware.memory_bytes_per_s


def _gather_s(job: Job, choice: Choice, num: _Num) -> float:
    size = job.precision.compute_bytes
    return sum(
        link_of(job, choice, axis).seconds(ring_bytes(elements * size, choice.mesh.size(axis)))
        for axis, elements in num.along(choice)
    )


def _shards_s(job: Job, choice: Choice) -> float:
    """Without a pipeline. A block is gathered, for each microbatch, while the one before it computes, and where
    gradients are reduced, reduced while the next one does; nothing hides the gathers of root and first block, and the
    last reduction. All blocks are taken to be as those with experts, if there are some."""
    elements, block = elements_of(job.sizes, choice.mesh.tp, choice.mesh.ep), block_times(job, choice)
    (stage,), is_tied = parts_of(job, choice), job.sizes.is_tied
    of_block, of_outside = _Num(elements.block, elements.experts), _Num(elements.outside(stage, is_tied=is_tied))
    gather, reduction = _gather_s(job, choice, of_block), _reduction_s(job, choice, of_block)
    outside = _gather_s(job, choice, of_outside)
    backward = block.backward + block.forward * choice.recomputes
    forwards = outside + gather + (stage.num_blocks - 1) * max(0.0, gather - block.forward)
    backwards = (stage.num_blocks - 1) * max(0.0, gather - backward)
    last = (stage.num_blocks - 1) * max(0.0, gather + reduction - backward)
    each, reducing = forwards + backwards, last - backwards + _reduction_s(job, choice, _Num(elements.embedding))
    # What is hidden still takes multiprocessors from what hides it.
    each += NCCL_SHARE * max(0.0, outside + (2 * stage.num_blocks - 1) * gather - each)
    every = _Num(elements.of(stage, is_tied=is_tied), elements.experts_of(stage))
    reducing += NCCL_SHARE * max(0.0, _reduction_s(job, choice, every) - reducing)
    reducing += _packing_s(job, choice, every)
    return choice.num_microbatches * each + choice.num_reductions * reducing


def _scheduled_shards_s(job: Job, choice: Choice) -> float:
    """A stage is gathered once, ahead of its first use, and reduced once: the first stage's gather, and its reduction,
    which is the last one, are waited for."""
    elements, stage = elements_of(job.sizes, choice.mesh.tp, choice.mesh.ep), parts_of(job, choice)[0]
    num = _Num(elements.of(stage, is_tied=False), elements.experts_of(stage))
    return _gather_s(job, choice, num) + _reduction_s(job, choice, num) + _packing_s(job, choice, num)
