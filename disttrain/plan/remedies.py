"""Says why nothing fits, and what would: whether batch, heads, layers or memory is in the way, and how to change it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from disttrain.plan.job import Job, MeshSizes, meshes, why_not

_MOST_TRIES = 12
"""Meshes of which it is asked whether they have room."""

Fits = Callable[[Job, MeshSizes], bool]


def why_nothing(job: Job, most_pipeline_ranks: int, fits: Fits) -> Iterator[str]:
    """Yields the cause, then changes of which each lets something fit. `fits` says whether a mesh has room."""
    every = [mesh for mesh in meshes(job) if mesh.replicate == 1]
    allowed = [mesh for mesh in every if mesh.pp <= most_pipeline_ranks]
    if any(why_not(job, mesh) is None for mesh in allowed):
        yield "Memory: no mesh has room for what it takes at its leanest, which is listed below."
        yield from _deeper(job, every, most_pipeline_ranks, fits)
        yield from _fewer_gpus(job, most_pipeline_ranks, fits)
        return
    short_of_batch = [mesh for mesh in allowed if _needs_only_a_batch(job, mesh)]
    if not short_of_batch:
        yield from _other_rules(job, allowed)
        yield from _fewer_gpus(job, most_pipeline_ranks, fits)
        return
    least = min(mesh.num_batch_parts for mesh in short_of_batch)
    yield (
        f"The batch: {job.num_sequences} sequences a step do not divide among the ranks of dp, which are {least} or "
        f"more, since tp is at most {max(mesh.tp for mesh in short_of_batch)} here and pp at most "
        f"{max(mesh.pp for mesh in short_of_batch)}."
    )
    yield from _larger_batch(job, short_of_batch, fits)
    yield from _deeper(job, every, most_pipeline_ranks, fits)
    yield from _fewer_gpus(job, most_pipeline_ranks, fits)


def _needs_only_a_batch(job: Job, mesh: MeshSizes) -> bool:
    return why_not(replace(job, num_sequences=mesh.num_batch_parts), mesh) is None


def _larger_batch(job: Job, candidates: Iterable[MeshSizes], fits: Fits) -> Iterator[str]:
    """Yields the least batch that divides and has room."""
    needed = sorted((_next_multiple(job.num_sequences, mesh.num_batch_parts), -mesh.tp, mesh) for mesh in candidates)
    for num_sequences, _, mesh in islice(needed, _MOST_TRIES):
        if fits(replace(job, num_sequences=num_sequences), mesh):
            yield f"{num_sequences} sequences a step (--batch-tokens {num_sequences * job.seq_size}) fit on {mesh}."
            return


def _next_multiple(number: int, of: int) -> int:
    return math.ceil(number / of) * of


def _deeper(job: Job, every: Iterable[MeshSizes], most_pipeline_ranks: int, fits: Fits) -> Iterator[str]:
    """Yields the first mesh with a deeper pipeline than is looked at, if it has room."""
    deeper = sorted(mesh for mesh in every if mesh.pp > most_pipeline_ranks and why_not(job, mesh) is None)
    for mesh in islice(deeper, _MOST_TRIES):
        if fits(job, mesh):
            yield f"A pipeline deeper than {most_pipeline_ranks}, if it is asked for: --mesh {mesh}."
            return


def _fewer_gpus(job: Job, most_pipeline_ranks: int, fits: Fits) -> Iterator[str]:
    """Yields a half, a quarter and so on of the GPUs, the first that has a mesh with room."""
    num_gpus = job.num_gpus
    while num_gpus % 2 == 0 and (num_gpus := num_gpus // 2):
        if num_gpus > job.node_size and num_gpus % job.node_size:
            return
        fewer = replace(job, num_gpus=num_gpus, node_size=min(job.node_size, num_gpus))
        possible = (mesh for mesh in meshes(fewer) if mesh.replicate == 1 and mesh.pp <= most_pipeline_ranks)
        allowed = sorted((mesh for mesh in possible if why_not(fewer, mesh) is None), reverse=True)
        for mesh in islice(allowed, _MOST_TRIES):
            if fits(fewer, mesh):
                yield f"{num_gpus} GPUs: with this batch {mesh} fits on them."
                return


def _other_rules(job: Job, candidates: Iterable[MeshSizes]) -> Iterator[str]:
    """Yields the rule that most meshes break, whatever the batch."""
    rules = Counter(why_not(replace(job, num_sequences=mesh.num_batch_parts), mesh) for mesh in candidates)
    (rule, _), *_ = rules.most_common(1) or [(None, 0)]
    yield f"The model: {rule or f'no mesh of {job.num_gpus} GPUs has pp within {job.sizes.num_layers} layers'}."
