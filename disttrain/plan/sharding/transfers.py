"""Plans how parameters go over the wire: in which form, and how many modules' together.

By the rules that `fully_shard` plans by itself (`fsdp2/transfers/forms.py`), for a model whose blocks are sharded one
by one, and then the model, or a pipeline's stage, with what is in no block. What the links cost is the hardware's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from disttrain.fsdp2.transfers.forms import TransferCost, may_go_together, plan_form, plan_together, reduce_buckets
from disttrain.plan.job import Choice, Job, Precision
from disttrain.plan.model.parts import StageParts, parameters_of_block, parameters_of_experts, parameters_outside
from disttrain.plan.model.sizes import LlamaSizes
from disttrain.plan.time.links import link_of

Form = tuple[bool, ...]
"""The parameters that are gathered directly into their places."""


@dataclass(frozen=True)
class ModelSharding:
    """All that decides how `fully_shard` treats a model: its sizes, the ranks that share its parameters, and what a
    gather over these ranks costs; None where they are on one node. Of experts, of which each rank along ep has its own,
    `num_expert_shards` are the ranks that share one."""

    sizes: LlamaSizes
    precision: Precision
    tp: int
    num_shards: int
    num_replicas: int
    shard_cost: TransferCost | None
    replica_cost: TransferCost | None
    ep: int = 1
    num_expert_shards: int = 1
    expert_cost: TransferCost | None = None

    @classmethod
    def of(cls, job: Job, choice: Choice) -> ModelSharding:
        mesh = choice.mesh
        shard_cost, replica_cost, expert_cost = (
            _cost_over(job, choice, axis) for axis in (mesh.shards, "replicate", mesh.expert_shards)
        )
        sharding = cls(job.sizes, job.precision, mesh.tp, mesh.num_shards, mesh.replicate, shard_cost, replica_cost)
        if job.sizes.experts is None:
            return sharding
        return replace(sharding, ep=mesh.ep, num_expert_shards=mesh.num_expert_shards, expert_cost=expert_cost)

    def padded(self, shape: tuple[int, int], num_shards: int) -> int:
        """Elements of a parameter that is cut along its rows, with its padding."""
        rows, columns = shape
        return -(-rows // num_shards) * num_shards * columns


@dataclass(frozen=True)
class Transfers:
    """Of one stage, or of the whole model.

    Args: block  the form of a block's parameters;  experts  of its experts';  dense_block  of those of a block that has
          none in a model with some;  outside  of those in no block;  sets  of how many modules each goes
          that are one after the other, as one message;  gathers_sets  not only reduces them so;  buckets  of what is
          outside, by its position there, that are reduced before the backward ends, or one;  has_outside_in_sets  the
          first module of the sets is what is in no block.
    """

    block: Form
    experts: Form
    dense_block: Form
    outside: Form
    sets: tuple[int, ...]
    gathers_sets: bool
    buckets: tuple[tuple[int, ...], ...]
    has_outside_in_sets: bool

    def __str__(self) -> str:
        words = [f"blocks {_in_words(self.block)}", f"experts {_in_words(self.experts)}" if self.experts else ""]
        words += [f"the rest {_in_words(self.outside)}" if self.outside else ""]
        sizes = sorted({size for size in self.sets if size > 1})
        if sizes:
            verb = "gathered and reduced" if self.gathers_sets else "reduced"
            words.append(f"{' or '.join(map(str, sizes))} modules {verb} together")
        return ", ".join(filter(None, words))


@cache
def transfers_of(sharding: ModelSharding, stage: StageParts) -> Transfers:
    """Plans the transfers of a stage, of which a rank of tensor parallel has its part."""
    sizes, precision, costs = sharding.sizes, sharding.precision, (sharding.shard_cost, sharding.replica_cost)
    children, outside = parameters_outside(sizes, sharding.tp, stage)
    num_shards = sharding.num_shards
    block_bytes, dense_bytes, outside_bytes, expert_bytes = (
        [sharding.padded(shape, num) * precision.compute_bytes for shape in shapes]
        for shapes, num in (
            (parameters_of_block(sizes, sharding.tp), num_shards),
            (parameters_of_block(sizes.without_experts, sharding.tp), num_shards),
            (outside, num_shards),
            (parameters_of_experts(sizes, sharding.tp, sharding.ep), sharding.num_expert_shards),
        )
    )
    buckets = reduce_buckets(children, [rows * columns * precision.parameter_bytes for rows, columns in outside])
    is_late = bool(outside) and len(buckets) == 1
    # Experts lie on another mesh than the rest of their block, and go by themselves.
    blocks_join = sizes.experts is None and may_go_together(sum(block_bytes), None, costs)
    outside_joins = is_late and blocks_join and may_go_together(sum(outside_bytes), None, costs)
    modules = [sum(outside_bytes)] * outside_joins + [sum(block_bytes)] * stage.num_blocks
    cost = sharding.replica_cost if sharding.shard_cost is None else sharding.shard_cost
    block_form, dense_form, outside_form = (
        plan_form(sizes, None, sharding.shard_cost) for sizes in (block_bytes, dense_bytes, outside_bytes)
    )
    return Transfers(
        block=block_form,
        experts=plan_form(expert_bytes, None, sharding.expert_cost) if expert_bytes else (),
        dense_block=dense_form,
        outside=outside_form if outside else (),
        sets=tuple(plan_together(modules, None, cost) if blocks_join else [1] * len(modules)),
        gathers_sets=sharding.shard_cost is not None,
        buckets=tuple(map(tuple, buckets)) if outside else (),
        has_outside_in_sets=outside_joins,
    )


def _cost_over(job: Job, choice: Choice, axis: str) -> TransferCost | None:
    """None where the ranks of the axis are on one node. A link says what a rank sends, a cost what all ranks gather."""
    num_ranks = choice.mesh.size(axis)
    if choice.mesh.num_on_node(axis, job.node_size) == num_ranks:
        return None
    link = link_of(job, choice, axis)
    return TransferCost(link.gather_latency_s, link.bytes_per_s * num_ranks / (num_ranks - 1))


def _in_words(form: Form) -> str:
    return "in place" if all(form) else "mixed" if any(form) else "flat"
