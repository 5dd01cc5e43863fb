"""The question to the planner, a `Job`, and one answer to it, a `Choice`, which may or may not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from disttrain.errors import SettingError
from disttrain.plan.model.experts import ExpertAssumptions
from disttrain.plan.model.sizes import LlamaSizes
from disttrain.plan.time.hardware import HARDWARE, Hardware

AXES = ("pp", "replicate", "dp", "ep", "cp", "tp")
FEWEST_POSITIONS = 8192
"""Of a sequence on each rank along cp, in the search: with fewer, dp does the same without an exchange."""
"""In the order of ranks: those of the last axis are neighbours, since it sends most."""


@dataclass(frozen=True)
class Precision:
    """Bytes of an element: of a parameter as it is kept, as it is computed with, of gradients as they are reduced, and
    of the optimizer's state for each."""

    name: str
    parameter_bytes: int
    compute_bytes: int
    reduce_bytes: int
    state_bytes: int
    is_sharded: bool
    """Through `fully_shard`, whose copies to compute with are not the parameters themselves."""


MIXED = Precision("mixed", 4, 2, 4, 8, is_sharded=True)
"""float32 parameters and AdamW, computed with in bfloat16."""
PURE = Precision("bf16", 2, 2, 2, 4, is_sharded=False)
"""All in bfloat16, without `fully_shard`: neither replicate nor dp."""


@dataclass(frozen=True)
class Job:
    """A training job: a model, GPUs, and the tokens of a step.

    Args: num_sequences  in a step of all ranks;  memory_share  of a GPU's memory that tensors may take: CUDA, NCCL and
          what the allocator cannot use need the rest;  has_kernels  `use_kernels` and the loss without logits;
          may_compile  blocks may be compiled;  captures  steps are captured, so that the host launches each as one;
          uses_float8  products of blocks in float8;  has_lean_loss  a pipeline's
          last stage computes the loss of its logits without copies of them in float32, as in examples/train_llama.py;
          assumed  of a model with experts.
    """

    sizes: LlamaSizes
    num_gpus: int
    hardware: Hardware = HARDWARE["h100"]
    node_size: int = 8
    seq_size: int = 8192
    num_sequences: int = 512
    memory_share: float = 0.9
    precision: Precision = MIXED
    has_kernels: bool = True
    may_compile: bool = True
    captures: bool = True
    uses_float8: bool = False
    has_lean_loss: bool = True
    assumed: ExpertAssumptions = field(default_factory=ExpertAssumptions)

    def __post_init__(self) -> None:
        for name in ("num_gpus", "node_size", "seq_size", "num_sequences"):
            value = getattr(self, name)
            if value < 1:
                raise SettingError("plan", f"{name} is {value}.", "Give a whole number from 1 on.")
        if not 0 < self.memory_share <= 1:
            raise SettingError("plan", f"memory_share is {self.memory_share:g}.", "Give a share above 0, up to 1.")
        if self.num_gpus > self.node_size and self.num_gpus % self.node_size:
            problem = f"{self.num_gpus} GPUs do not fill nodes of {self.node_size}."
            raise SettingError("plan", problem, "Give a multiple of --node-size, or another --node-size.")
        if self.uses_float8 and not self.hardware.float8_flops:
            raise SettingError("plan", f"{self.hardware.name} has no float8.", "Leave --float8 out.")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, since what is known of a job's choices is found by the job, again and again."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    @cached_property
    def without_experts(self) -> Job:
        """The same with a model of the blocks that have an MLP."""
        return replace(self, sizes=self.sizes.without_experts)

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.seq_size

    @property
    def usable_bytes(self) -> float:
        """Of a GPU, for tensors."""
        return self.memory_share * self.hardware.memory_gib * 2**30


@dataclass(frozen=True, order=True)
class MeshSizes:
    """Ranks along each axis, in the order of `AXES`.

    All of replicate, dp and ep are data-parallel ranks, with sequences of their own. Along ep each has other experts,
    along cp other positions of the same sequences. So experts are sharded over dp and cp, and all other parameters over
    dp, ep and cp. `"dp,ep"` names both as one axis.
    """

    pp: int = 1
    replicate: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def num_gpus(self) -> int:
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def num_batch_parts(self) -> int:
        """Ranks that have different sequences of a step."""
        return self.replicate * self.dp * self.ep

    @property
    def num_shards(self) -> int:
        """Of each parameter that is no expert's."""
        return self.size(self.shards)

    @property
    def shards(self) -> str:
        """The axis, or several as one, along which these shards lie."""
        return ",".join(["dp"] + ["ep"] * (self.ep > 1) + ["cp"] * (self.cp > 1))

    @property
    def num_expert_shards(self) -> int:
        """Of each parameter of an expert."""
        return self.size(self.expert_shards)

    @property
    def expert_shards(self) -> str:
        """The axis, or both as one, along which these lie."""
        return "dp" if self.cp == 1 else "dp,cp"

    def stride(self, axis: str) -> int:
        """Returns the difference in rank between neighbours along the axis."""
        innermost = axis.rpartition(",")[2]
        return math.prod(self.size(inner) for inner in AXES[AXES.index(innermost) + 1 :])

    def size(self, axis: str) -> int:
        """Ranks along the axis, or along several named with commas."""
        return math.prod(getattr(self, name) for name in axis.split(","))

    def num_on_node(self, axis: str, node_size: int) -> int:
        """Ranks along the axis that share a node."""
        return min(self.size(axis), max(1, node_size // self.stride(axis)))

    def __str__(self) -> str:
        named = [f"{axis}={self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return ",".join(named) or "dp=1"


@dataclass(frozen=True)
class Choice:
    """One way to run a job.

    Args: microbatch_size  sequences, of which each rank takes num_microbatches in a step;  schedule  None without a
          pipeline;  recomputes  activation checkpoints around blocks;  is_compiled  blocks;  reduces_each  gradients
          after each microbatch, where there is no pipeline: its schedule reduces once;  stages_per_rank  of the
          pipeline; None: as many as the schedule has where nobody says.
    """

    mesh: MeshSizes
    microbatch_size: int
    num_microbatches: int
    schedule: str | None = None
    recomputes: bool = False
    is_compiled: bool = False
    reduces_each: bool = False
    stages_per_rank: int | None = None

    @property
    def pipeline(self) -> tuple[str, int, int | None]:
        """The schedule, the ranks of the pipeline, and the stages of each."""
        assert self.schedule is not None
        return self.schedule, self.mesh.pp, self.stages_per_rank

    @property
    def schedule_words(self) -> str:
        """The schedule, and how many stages a rank has where that is not what it has by itself."""
        stages = f"/{self.stages_per_rank}" if self.stages_per_rank else ""
        return f"{self.schedule}{stages}" if self.schedule else "-"

    def tokens(self, job: Job) -> float:
        """Of a microbatch, on one rank."""
        return self.microbatch_size * job.seq_size / self.mesh.cp

    @property
    def num_reductions(self) -> int:
        """Of each gradient in a step."""
        return self.num_microbatches if self.reduces_each else 1

    @property
    def has_whole_logits(self) -> bool:
        """Of its part of the vocabulary: whichever kernels there are, a head that is cut, and a pipeline's last stage,
        hand their logits to the loss (as in examples/train_llama.py)."""
        return self.schedule is not None or self.mesh.tp > 1

    def __str__(self) -> str:
        words = [str(self.mesh)]
        if self.schedule:
            words.append(self.schedule_words)
        words.append(f"{self.num_microbatches} x {self.microbatch_size}")
        words += ["recompute"] * self.recomputes + ["compiled"] * self.is_compiled
        words += ["reduce each"] * self.reduces_each
        return " ".join(words)


def why_not(job: Job, mesh: MeshSizes) -> str | None:
    """The rule that a mesh breaks, whatever else is chosen; None: none."""
    sizes, experts = job.sizes, job.sizes.experts
    if mesh.tp > 1:
        mlps = [("the MLP", sizes.ffn_size)] if experts is None or experts.num_dense else []
        if experts is not None:
            mlps += [("experts", experts.ffn_size), ("shared experts", experts.shared_size)]
        for name, count in (("heads", sizes.num_heads), *mlps, ("sequences", job.seq_size // mesh.cp)):
            if count % mesh.tp:
                return f"tp={mesh.tp} does not divide {name} ({count})"
        if mesh.tp % sizes.num_kv_heads and sizes.num_kv_heads % mesh.tp:
            return f"tp={mesh.tp} and {sizes.num_kv_heads} heads of keys don't divide"
    if mesh.ep > 1 and experts is None:
        return f"ep={mesh.ep} of a model without experts"
    if experts is not None and (experts.of_rank(mesh.ep) * (mesh.ep - 1)) >= experts.num_experts:
        return f"ep={mesh.ep} leaves ranks without any of {experts.num_experts} experts"
    if job.seq_size % mesh.cp:
        return f"cp={mesh.cp} does not divide sequences ({job.seq_size})"
    if mesh.pp > sizes.num_layers:
        return f"pp={mesh.pp} needs as many layers"
    if job.num_sequences % mesh.num_batch_parts:
        return f"{job.num_sequences} sequences do not divide among {mesh.num_batch_parts} ranks"
    if not job.precision.is_sharded and mesh.num_batch_parts > 1:
        return "without fully_shard there is no dp"
    return None


def meshes(job: Job) -> Iterator[MeshSizes]:
    """Every mesh of the job's GPUs that keeps tensor parallel within a node, whether it fits or not."""
    for tp in divisors(job.num_gpus):
        if job.node_size % tp:
            continue  # some of its groups would lie on two nodes
        for pp in divisors(job.num_gpus // tp):
            for ep in _expert_axes(job, job.num_gpus // tp // pp, tp):
                for cp in _context_axes(job, job.num_gpus // tp // pp // ep):
                    rest = job.num_gpus // tp // pp // ep // cp
                    for replicate in divisors(rest):
                        # One copy of each shard: that is tensor parallel or a pipeline alone, and replicas of it need
                        # no more.
                        if replicate == 1 or rest * cp // replicate > 1:
                            yield MeshSizes(pp, replicate, rest // replicate, ep, cp, tp)


def _context_axes(job: Job, num_ranks: int) -> Iterator[int]:
    """Yields sizes of cp by which parts of a sequence are long still."""
    for cp in divisors(num_ranks):
        if cp == 1 or (job.seq_size % cp == 0 and job.seq_size // cp >= FEWEST_POSITIONS):
            yield cp


def _expert_axes(job: Job, num_ranks: int, tp: int) -> Iterator[int]:
    """Yields sizes of ep with as many experts on each rank, that fill nodes or divide one."""
    experts = job.sizes.experts
    for ep in divisors(num_ranks) if experts is not None else [1]:
        fills = job.node_size % (ep * tp) == 0 or (ep * tp) % job.node_size == 0
        if ep == 1 or (experts is not None and experts.num_experts % ep == 0 and fills):
            yield ep


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]
