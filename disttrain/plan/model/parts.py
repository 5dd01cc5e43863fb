"""Parts of the model on each rank: its stages, in blocks, and the elements of their parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.balance import BlockCosts, balance
from disttrain.pipelining.schedule.catalogue import find_schedule_kind, make_schedule
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.plan.job import Choice, Job
from disttrain.plan.model.sizes import LlamaSizes


@dataclass(frozen=True)
class StageParts:
    """One stage, or the whole model; `num_dense` blocks, the first ones, are without experts in a model with some."""

    num_blocks: int
    has_embedding: bool
    has_head: bool
    num_dense: int = 0


@dataclass(frozen=True)
class Elements:
    """Of parameters that one rank has of tensor and expert parallel, before they are sharded."""

    block: int
    """Of each block, without its experts."""
    dense_block: int
    """Of each block that has none."""
    experts: int
    """Of each block: sharded along dp, all else along dp and ep."""
    embedding: int
    head: int
    """With the last norm."""

    def of(self, stage: StageParts, *, is_tied: bool) -> int:
        """All but experts."""
        blocks = (stage.num_blocks - stage.num_dense) * self.block + stage.num_dense * self.dense_block
        return blocks + self.outside(stage, is_tied=is_tied)

    def experts_of(self, stage: StageParts) -> int:
        return (stage.num_blocks - stage.num_dense) * self.experts

    def outside(self, stage: StageParts, *, is_tied: bool) -> int:
        """Counts what is in no block: `fully_shard` on the stage gathers that by itself."""
        both = self.embedding * stage.has_embedding + self.head * stage.has_head
        return both - self.embedding * (is_tied and stage.has_embedding and stage.has_head)


@cache
def elements_of(sizes: LlamaSizes, tp: int, ep: int = 1) -> Elements:
    """Matrices are cut along tp, but for keys' and values' where there are more ranks than heads; norms are whole."""
    block, dense_block, experts = (
        sum(map(math.prod, shapes))
        for shapes in (
            parameters_of_block(sizes, tp),
            parameters_of_block(sizes.without_experts, tp),
            parameters_of_experts(sizes, tp, ep),
        )
    )
    vocab = -(-sizes.vocab_size // tp) * sizes.dim
    return Elements(block, dense_block, experts, vocab, vocab + sizes.dim)


def parameters_of_block(sizes: LlamaSizes, tp: int) -> list[tuple[int, int]]:
    """Rows and columns of each parameter of a block that one rank of tensor parallel has, but of experts: norms, and
    matrices."""
    norm, out = (sizes.dim, 1), (sizes.dim, sizes.value_size // tp)
    norms = [norm, norm] + [(sizes.extra_elements, 1)] * (sizes.extra_elements > 0)
    if sizes.latent is not None:
        projections = sizes.latent.matrices(sizes.dim, sizes.num_heads // tp)
        norms.append((sizes.latent.norm_elements, 1))
    else:
        keys = -(-sizes.key_size // tp) if sizes.num_kv_heads >= tp else sizes.key_size
        projections = [(rows, sizes.dim) for rows in (sizes.query_size // tp, keys, keys)]
    return [*norms, *projections, out, *mlp_matrices(sizes, tp), *_router(sizes)]


def mlp_matrices(sizes: LlamaSizes, tp: int) -> list[tuple[int, int]]:
    """The matrices of the MLP, or of shared experts, that one rank has, as rows and columns: gate, up, down."""
    width = (sizes.ffn_size if sizes.experts is None else sizes.experts.shared_size) // tp
    return [(width, sizes.dim), (width, sizes.dim), (sizes.dim, width)] if width else []


def _router(sizes: LlamaSizes) -> list[tuple[int, int]]:
    if sizes.experts is None:
        return []
    each = sizes.dim + sizes.experts.has_bias + sizes.experts.has_balance_bias
    return [(sizes.experts.num_experts, each)]


def parameters_of_experts(sizes: LlamaSizes, tp: int, ep: int) -> list[tuple[int, int]]:
    """Rows and columns of the two parameters that one rank has of a block's experts, all of which lie in them: gate and
    up, and down. A bias counts as another column of its matrix."""
    if sizes.experts is None:
        return []
    num, width, bias = sizes.experts.of_rank(ep), sizes.experts.ffn_size // tp, sizes.experts.has_bias
    return [(num * 2 * width, sizes.dim + bias), (num * sizes.dim, width + bias)]


def parameters_outside(sizes: LlamaSizes, tp: int, stage: StageParts) -> tuple[list[int], list[tuple[int, int]]]:
    """Likewise of what is in no block, and which child of the model holds each: embedding, blocks, norm, head."""
    vocab = (-(-sizes.vocab_size // tp), sizes.dim)
    has_own_head = stage.has_head and not (sizes.is_tied and stage.has_embedding)
    parameters = (
        [(0, vocab)] * stage.has_embedding + [(2, (sizes.dim, 1))] * stage.has_head + [(3, vocab)] * has_own_head
    )
    return [child for child, _ in parameters], [shape for _, shape in parameters]


def tied_elements(job: Job, choice: Choice) -> int:
    """Of the matrix that a pipeline's first and last stage have a copy of each: one rank's part."""
    is_shared = job.sizes.is_tied and choice.mesh.pp > 1
    return elements_of(job.sizes, choice.mesh.tp).embedding // choice.mesh.dp if is_shared else 0


def local_key_size(sizes: LlamaSizes, tp: int) -> int:
    """Elements of keys of a token that one rank computes: those of one head at least."""
    assert sizes.head_size is not None
    return max(1, sizes.num_kv_heads // tp) * sizes.head_size


@cache
def stages_of(sizes: LlamaSizes, num_stages: int) -> tuple[StageParts, ...]:
    """As `split_blocks` cuts, so that a token meets matrices of like size on each stage."""
    dense, blocks = sizes.without_experts.block_active_elements, sizes.num_layers - sizes.num_dense
    matrices = (float(dense),) * sizes.num_dense + (float(sizes.block_active_elements),) * blocks
    ends = [0, *balance(BlockCosts(matrices, 0, float(sizes.vocab_elements)), num_stages), sizes.num_layers]
    return tuple(
        StageParts(
            end - first,
            has_embedding=index == 0,
            has_head=index == num_stages - 1,
            num_dense=max(0, min(end, sizes.num_dense) - first),
        )
        for index, (first, end) in enumerate(pairwise(ends))
    )


def num_stages_of(choice: Choice) -> int:
    if choice.schedule is None:
        return 1
    return choice.mesh.pp * (choice.stages_per_rank or _stages_per_rank(choice.schedule))


@cache
def _stages_per_rank(schedule: str) -> int:
    return find_schedule_kind(schedule).stages_per_rank


def has_any_stages(schedule: str) -> bool:
    """True where the schedule takes any number of stages for each rank."""
    return find_schedule_kind(schedule).any_stages


def parts_of(job: Job, choice: Choice) -> tuple[StageParts, ...]:
    """The stages of a choice, in order.

    Raises: ScheduleError when both ends of a pipeline are on one rank, and have one matrix: each would shard its own.
    """
    num_stages = num_stages_of(choice)
    if job.sizes.is_tied and choice.schedule is not None:
        first = next(of_rank for of_rank in stages_of_ranks(*choice.pipeline) if 0 in of_rank)
        if num_stages - 1 in first:
            raise ScheduleError(
                "plan",
                f"{choice.schedule} has the first and the last stage on one rank, each with a copy of the tied matrix.",
                "Take one with them apart: 1F1B or Interleaved1F1B, say.",
            )
    return stages_of(job.sizes, num_stages)


def parts_of_ranks(job: Job, choice: Choice) -> list[tuple[StageParts, ...]]:
    """The stages of each rank of the pipeline; without one, the whole model."""
    stages = parts_of(job, choice)
    if choice.schedule is None:
        return [stages]
    return [tuple(stages[stage] for stage in of_rank) for of_rank in stages_of_ranks(*choice.pipeline)]


_FILLING = 4
"""Rounds of microbatches, as many as ranks, after which nothing new happens: more only repeat the steady phase."""
_KEEP_ALL = frozenset({"GPipe", "LoopedBFS"})
"""Schedules that have no such phase: they keep the activations of all microbatches."""


def fewer_microbatches(name: str, num_ranks: int, num_microbatches: int) -> int:
    """As few as show a schedule's peaks and its bubble. What divides among the ranks still does."""
    if name in _KEEP_ALL:
        return num_microbatches
    return min(num_microbatches, _FILLING * num_ranks + num_microbatches % num_ranks)


@cache
def schedule_of(pipeline: tuple[str, int, int | None], num_microbatches: int) -> Schedule:
    """Computations only; kept, since many choices have the same. Raises: ScheduleError."""
    name, num_ranks, stages_per_rank = pipeline
    return make_schedule(name, num_ranks, num_microbatches, stages_per_rank)


@cache
def stages_of_ranks(name: str, num_ranks: int, stages_per_rank: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Returns the stages of each rank. Raises: ScheduleError."""
    return schedule_of((name, num_ranks, stages_per_rank), _FILLING * num_ranks).placement.stages
