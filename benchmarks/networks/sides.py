"""Both libraries' steps of one model under one parallelism, the same but for the library.

fsdp, hsdp, tp, 2d: `models.cases`. pp: a stage on each rank, under 1F1B. Blocks are compiled or not on both sides, and
parameters kept and computed with in one dtype each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness import OURS, TORCH
from models.cases import MESHES, Case, Way, ranks_per_batch
from models.model import Sizes
from pipelines.case import Case as PipelineCase
from pipelines.model import Sizes as StageSizes
from pipelines.ranks import Ranks

import disttrain
from disttrain import fsdp2
from disttrain.pipelining import make_schedule

PARALLELISMS = ("fsdp", "hsdp", "tp", "2d", "pp")
FORMS = ("flat", "in_place", "mixed")
"""Of fully_shard's TransferPolicy."""
NUM_BATCHES = 2
Step = Callable[[int], tuple[float, float]]
"""Takes a step's number; returns its seconds on this rank, and its loss, which counts where it is averaged."""


def in_pairs(parallelism: str) -> bool:
    """Whether neighbours belong together, as the ranks of one host."""
    return parallelism in MESHES


def sizes_of(options: argparse.Namespace) -> Sizes:
    heads = options.heads or max(options.dim // (128 if options.dim >= 2048 else 64), 4)
    shared = max(number for number in range(1, max(heads // 4, 4) + 1) if heads % number == 0)
    return Sizes(
        dim=options.dim,
        layers=options.layers,
        heads=heads,
        kv_heads=options.kv_heads or shared,
        ffn=options.ffn or -(-options.dim * 11 // 4 // 64) * 64,
        vocab=options.vocab,
        seq=options.seq,
    )


def num_parameters(sizes: Sizes) -> int:
    kv_dim = sizes.dim // sizes.heads * sizes.kv_heads
    per_layer = 2 * sizes.dim * (sizes.dim + kv_dim) + 3 * sizes.dim * sizes.ffn + 2 * sizes.dim
    return sizes.layers * per_layer + 2 * sizes.dim * sizes.vocab + sizes.dim


def make_step(side: str, parallelism: str, options: argparse.Namespace) -> Step:
    """Collective. Of each side with the same parameters and batches."""
    if parallelism == "pp":
        return _pipeline(side, options)
    sizes = sizes_of(options)
    library, _, form = side.partition(", ")
    is_ours = library == OURS
    way = Way(
        is_ours,
        is_compiled=options.compile,
        computes_in=getattr(torch, options.dtype),
        shard_options=_transfers(form or options.form, options.together) if is_ours else {},
        has_averages=options.optimizer == "adamw",
    )
    case = Case(parallelism, way, sizes, options.device, 1e-4)
    random = torch.Generator().manual_seed(1 + disttrain.get_rank() // ranks_per_batch(parallelism))
    drawn = torch.randint(0, sizes.vocab, (NUM_BATCHES, options.batch, sizes.seq + 1), generator=random)
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in drawn.to(options.device)]

    def step(number: int) -> tuple[float, float]:
        seconds, loss = case.step(*batches[number % NUM_BATCHES])
        return seconds, loss.item()

    return step


def sides_of(parallelism: str, options: argparse.Namespace) -> list[str]:
    """The sides that are measured: those asked for, and ours in each of the forms, where parameters are sharded."""
    forms = options.forms if parallelism in ("fsdp", "hsdp", "2d") else []
    return [*options.sides, *(f"{OURS}, {form}" for form in forms)]


def _transfers(form: str | None, together: int | None) -> dict[str, Any]:
    """The argument of fully_shard that says how parameters go over the wire, where anything is asked for."""
    asked = {name: value for name, value in (("form", form), ("together", together)) if value is not None}
    if not asked:
        return {}
    policy: Any = getattr(fsdp2, "TransferPolicy", None)
    if policy is None:
        raise SystemExit(f"{asked}: fully_shard is not asked such things yet.")
    return {"transfer_policy": policy(**asked)}


def _pipeline(side: str, options: argparse.Namespace) -> Step:
    sizes, world_size = sizes_of(options), disttrain.get_world_size()
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    stage_sizes = StageSizes(
        dim=sizes.dim,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        ffn=sizes.ffn,
        layers=sizes.layers,
        vocab=sizes.vocab,
        seq=sizes.seq,
        microbatches=options.microbatches,
        microbatch_size=options.batch,
    )
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, sizes.vocab, (stage_sizes.num_sequences, sizes.seq), generator=random).to(device)
    arguments = argparse.Namespace(
        torch_device=device,
        sizes=stage_sizes,
        dtype=options.dtype,
        tokens=tokens,
        ranks=Ranks(1, device, one_group=False, copied_bytes=0),
    )
    plan = make_schedule("1F1B", world_size, options.microbatches)
    library = {OURS: "disttrain", TORCH: "torch"}[side]
    case = PipelineCase(library, plan, arguments, is_compiled=options.compile)

    def step(_number: int) -> tuple[float, float]:
        case.step()
        # The last rank alone has losses.
        loss = sum(loss.item() for loss in case.losses) / options.microbatches * world_size
        return case.times[-1][1], loss

    return step
