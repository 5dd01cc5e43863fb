"""What each rank sends in a step, axis by axis, and over which links.

    dp         parameters are gathered; gradients, once in a step or for each microbatch, reduced and scattered
    replicate  reduced gradients are summed over copies
    tp         activations are gathered before each pair of layers, and reduced and scattered after it
    pp         activations go to the next stage, and their gradients back; a tied matrix's gradient from end to end

Bytes are those of collectives that go round a ring, in which each rank hands on all but one part.
"""

from __future__ import annotations

from dataclasses import dataclass

from disttrain.plan.job import Choice, Job
from disttrain.plan.model.activations import kept_of
from disttrain.plan.model.parts import Elements, StageParts, elements_of, parts_of, tied_elements
from disttrain.plan.time.links import link_of
from disttrain.plan.time.transfers import Counts, transfers_of

BLOCK_GATHERS = 2
"""Of tensor parallel, in each direction of a block, and as many reductions."""


@dataclass(frozen=True)
class Traffic:
    """Of one axis in a step, by the rank that sends most; `between_share` of its ranks send to another node.

    `latency_s` is what a call takes before its bytes count: of a gather, or of a pipeline's message. A call is one
    launch, and as many collectives as bring parameters right into their places. `form` says how parameters go.
    """

    axis: str
    num_ranks: int
    num_calls: int
    sent_bytes: int
    between_share: float
    latency_s: float
    num_collectives: int
    form: str = ""

    @property
    def between_bytes(self) -> float:
        """Out of the node, mean over the ranks of the axis."""
        return self.sent_bytes * self.between_share


def ring_bytes(num_bytes: float, num_ranks: int) -> float:
    """What a rank sends to gather so much, or to reduce and scatter it."""
    return num_bytes * (num_ranks - 1) / num_ranks


def activation_bytes(job: Job, choice: Choice) -> float:
    """What a rank of tensor parallel sends for one gather, or one reduction, of a microbatch's activations."""
    tokens = choice.microbatch_size * job.seq_size
    return ring_bytes(tokens * job.sizes.dim * job.precision.compute_bytes, choice.mesh.tp)


def traffic_of(job: Job, choice: Choice) -> tuple[Traffic, ...]:
    """Axes of one rank send nothing, and are left out."""
    stages, elements = parts_of(job, choice), elements_of(job.sizes, choice.mesh.tp)
    per_rank = max(1, len(stages) // choice.mesh.pp)
    ranks = [stages] if choice.schedule is None else [stages[rank : rank + 1] for rank in range(len(stages))]
    found = [
        *_of_shards(job, choice, elements, max(ranks, key=lambda own: _num_elements(job, elements, own)), per_rank),
        _of_tensor_parallel(job, choice, stages, per_rank),
        _of_pipeline(job, choice, per_rank),
    ]
    return tuple(one for one in found if one.num_ranks > 1)


def _num_elements(job: Job, elements: Elements, stages: tuple[StageParts, ...]) -> int:
    return sum(elements.of(stage, is_tied=job.sizes.is_tied) for stage in stages)


def _of_shards(
    job: Job, choice: Choice, elements: Elements, stages: tuple[StageParts, ...], per_rank: int
) -> tuple[Traffic, Traffic]:
    mesh, precision, is_tied = choice.mesh, job.precision, job.sizes.is_tied
    whole = per_rank * _num_elements(job, elements, stages)
    reduced = choice.num_reductions * whole
    outside = per_rank * sum(elements.outside(stage, is_tied=is_tied) for stage in stages)
    plans = [transfers_of(job, choice, stage) for stage in stages]
    is_scheduled = choice.schedule is not None
    # Without a pipeline each microbatch gathers blocks for its forward and for its backward, and the root once.
    times = 1 if is_scheduled else choice.num_microbatches
    gathers = sum((plan.gathers(outside_once=not is_scheduled) for plan in plans), Counts()) * (times * per_rank)
    reductions = sum((plan.reductions(is_scheduled=is_scheduled) for plan in plans), Counts())
    reductions *= choice.num_reductions * per_rank
    gathered = whole if is_scheduled else times * (2 * whole - outside)
    sent = ring_bytes(gathered * precision.compute_bytes + reduced * precision.reduce_bytes, mesh.dp)
    shard = reduced / mesh.dp * precision.reduce_bytes
    copied = 2 * ring_bytes(shard, mesh.replicate)
    return (
        _traffic(job, choice, "dp", gathers + reductions, sent, str(plans[0])),
        _traffic(job, choice, "replicate", Counts(reductions.num_calls, reductions.num_calls), copied),
    )


def _of_tensor_parallel(job: Job, choice: Choice, stages: tuple[StageParts, ...], per_rank: int) -> Traffic:
    directions = 3 if choice.recomputes else 2
    most = max(stages, key=lambda stage: stage.num_blocks + stage.has_head + stage.has_embedding)
    blocks = per_rank * most.num_blocks * directions * 2 * BLOCK_GATHERS
    # An embedding's result is reduced and a head's input gathered, and so are their gradients the other way.
    ends = 2 * (most.has_embedding + most.has_head)
    calls = choice.num_microbatches * (blocks + ends)
    return _traffic(job, choice, "tp", Counts(calls, calls), calls * activation_bytes(job, choice))


def _of_pipeline(job: Job, choice: Choice, per_rank: int) -> Traffic:
    calls, tied = 2 * per_rank * choice.num_microbatches, tied_elements(job, choice)
    sent_bytes = calls * kept_of(job, choice).message + tied * job.precision.parameter_bytes
    calls += tied > 0
    return _traffic(job, choice, "pp", Counts(calls, calls), sent_bytes)


def _traffic(job: Job, choice: Choice, axis: str, counts: Counts, sent_bytes: float, form: str = "") -> Traffic:
    num_ranks = choice.mesh.size(axis)
    on_node = choice.mesh.num_on_node(axis, job.node_size)
    between = 0.0 if on_node == num_ranks else 1 / on_node
    latency_s = link_of(job, choice, axis).gather_latency_s
    return Traffic(
        axis, num_ranks, counts.num_calls, round(sent_bytes), between, latency_s, counts.num_collectives, form
    )
