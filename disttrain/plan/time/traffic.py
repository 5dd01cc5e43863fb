"""Counts what each rank sends in a step, axis by axis, and over which links.

    dp         parameters are gathered; gradients, once in a step or for each microbatch, reduced and scattered
    replicate  reduced gradients are summed over copies
    dp,ep      both at once, where experts are exchanged: of all other parameters
    ep         tokens go to their experts and back, as do gradients
    cp         keys and values go to the ranks whose queries see them, and once more, and their gradients back
    tp         activations are gathered before each pair of layers, and reduced and scattered after it
    pp         activations go to the next stage, and their gradients back; a tied matrix's gradient from end to end

Bytes are those of collectives that go round a ring, in which each rank hands on all but one part.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from disttrain.fsdp2.estimating.values import Message
from disttrain.plan.job import Choice, Job
from disttrain.plan.model.activations import kept_of
from disttrain.plan.model.parts import StageParts, parts_of, parts_of_ranks, tied_elements
from disttrain.plan.sharding.step import step_of
from disttrain.plan.sharding.transfers import ModelSharding, transfers_of
from disttrain.plan.time.context import keys_of
from disttrain.plan.time.exchange import both_ways
from disttrain.plan.time.links import link_of

BLOCK_GATHERS = 2
"""Of tensor parallel, in each direction of a block, and as many reductions."""


@dataclass(frozen=True)
class Counts:
    """Calls that are one launch each, and the collectives in them."""

    num_calls: int
    num_collectives: int


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
    """Counts what a rank sends to gather so much, or to reduce and scatter it."""
    return num_bytes * (num_ranks - 1) / num_ranks


def activation_bytes(job: Job, choice: Choice) -> float:
    """Counts what a rank of tensor parallel sends for one gather, or one reduction, of a microbatch's activations."""
    return ring_bytes(choice.tokens(job) * job.sizes.dim * job.precision.compute_bytes, choice.mesh.tp)


def traffic_of(job: Job, choice: Choice) -> tuple[Traffic, ...]:
    """Axes of one rank send nothing, and are left out."""
    stages = parts_of(job, choice)
    per_rank = max(1, len(stages) // choice.mesh.pp)
    of_axes = [
        *_of_shards(job, choice),
        *_of_exchange(job, choice),
        *_of_context(job, choice),
        _of_tensor_parallel(job, choice, stages, per_rank),
        _of_pipeline(job, choice, per_rank),
    ]
    return tuple(traffic for traffic in of_axes if traffic.num_ranks > 1)


def _of_shards(job: Job, choice: Choice) -> list[Traffic]:
    """Counts the messages of `fully_shard` along its axes, on the rank that sends most in gathers and reductions."""
    sharding, of_ranks, mesh = ModelSharding.of(job, choice), parts_of_ranks(job, choice), choice.mesh
    steps = [
        step_of(sharding, choice, stages).messages_of(choice.num_microbatches) for stages in dict.fromkeys(of_ranks)
    ]

    def sent(messages: Counter[Message], num_ranks: int | None, *operations: str) -> tuple[Counts, int]:
        of_axis = [
            (message, count)
            for message, count in messages.items()
            if message.operation in operations and num_ranks in (None, message.num_ranks)
        ]
        counts = Counts(
            sum(count for _, count in of_axis), sum(count * message.num_collectives for message, count in of_axis)
        )
        return counts, sum(count * message.sent_bytes for message, count in of_axis)

    both = "all_gather", "reduce_scatter"
    most = max(steps, key=lambda messages: sent(messages, None, *both)[1])
    form = str(transfers_of(sharding, of_ranks[0][0]))
    traffic = [_traffic(job, choice, mesh.shards, *sent(most, mesh.num_shards, *both), form)]
    if mesh.ep > 1:
        traffic.append(_traffic(job, choice, mesh.expert_shards, *sent(most, mesh.num_expert_shards, *both)))
    return [*traffic, _traffic(job, choice, "replicate", *sent(most, None, "all_reduce"))]


def _of_exchange(job: Job, choice: Choice) -> list[Traffic]:
    """By the rank with most blocks that have experts."""
    ways = both_ways(job, choice)
    if ways is None:
        return []
    blocks = max(
        sum(stage.num_blocks - stage.num_dense for stage in of_rank) for of_rank in parts_of_ranks(job, choice)
    )
    passes = choice.num_microbatches * blocks * (3 if choice.recomputes else 2)
    sent, between = (
        passes * sum(num_bytes) for num_bytes in ([way.sent_bytes for way in ways], [way.between_bytes for way in ways])
    )
    calls = 2 * passes
    return [Traffic("ep", choice.mesh.ep, calls, round(sent), between / sent, ways[0].latency_s, calls)]


def _of_context(job: Job, choice: Choice) -> list[Traffic]:
    """By the rank with most blocks; half as much goes forward as goes backward."""
    way = keys_of(job, choice)
    if way is None:
        return []
    blocks = max(sum(stage.num_blocks for stage in of_rank) for of_rank in parts_of_ranks(job, choice))
    passes = choice.num_microbatches * blocks * (4 if choice.recomputes else 3)
    calls = passes * (choice.mesh.cp - 1)
    share = way.between_bytes / way.sent_bytes
    return [Traffic("cp", choice.mesh.cp, calls, round(passes * way.sent_bytes), share, way.latency_s, calls)]


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
