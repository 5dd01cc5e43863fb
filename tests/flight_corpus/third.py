"""The third set: pipelines that wait for a slow stage, and such that only wait as pipelines do.

It was made when the analyzer already told slow stages, and judged before anything was mended: docs/flight_verdicts.md.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

import disttrain
from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.pipelining import PipelineStage, make_schedule
from disttrain.pipelining.runtime.schedule_runtime import PipelineSchedule
from tests.flight_corpus.case import Cases, labelled
from tests.flight_corpus.tensors import device, ones
from tests.flight_corpus.training import DIM, Layer

CASES: Cases = []
NUM_MICROBATCHES = 4


def timed_pipeline(
    rank: int,
    num_ranks: int,
    *,
    name: str = "1F1B",
    num_steps: int = 5,
    stages_per_rank: int = 1,
    forward_s: float = 0.0,
    backward_s: float = 0.0,
    between_s: tuple[float, ...] = (),
) -> None:
    """Steps of a pipeline whose stages on this rank take so long, with such pauses after the first of them."""

    def forward(_num_passes: int) -> None:
        time.sleep(forward_s)

    def backward(_grad: torch.Tensor) -> None:
        time.sleep(backward_s)

    schedule = make_schedule(name, num_ranks, NUM_MICROBATCHES, stages_per_rank)
    stages = []
    for place in range(stages_per_rank):
        layer = Layer(forward).to(device())
        layer.linear.weight.register_hook(backward)
        stages.append(PipelineStage(layer, rank + place * num_ranks, num_ranks * stages_per_rank, device()))
    runner = PipelineSchedule(stages, schedule, F.mse_loss)
    for number in range(num_steps):
        runner.step(*([ones(8, DIM)] if rank == 0 else []), target=0 * ones(8, DIM))
        if number < len(between_s):
            time.sleep(between_s[number])


@labelled(CASES, Kind.STRAGGLER, 3, num_ranks=4)
def slow_backward_of_the_last_stage(rank: int) -> None:
    timed_pipeline(rank, 4, num_steps=6, forward_s=0.01, backward_s=0.2 if rank == 3 else 0.02)


@labelled(CASES, Kind.STRAGGLER, 0)
def slow_backward_of_the_first_stage(rank: int) -> None:
    """Nobody waits for what it sends then, but for the next step."""
    timed_pipeline(rank, 3, num_steps=6, forward_s=0.01, backward_s=0.2 if rank == 0 else 0.02)


@labelled(CASES, Kind.STRAGGLER, 0, num_ranks=4)
def slow_first_stage(rank: int) -> None:
    timed_pipeline(rank, 4, name="GPipe", forward_s=0.2 if rank == 0 else 0.02, backward_s=0.02)


@labelled(CASES, Kind.STRAGGLER, 1)
def slow_stage_without_a_bubble(rank: int) -> None:
    timed_pipeline(rank, 3, name="ZB-H1", forward_s=0.02, backward_s=0.2 if rank == 1 else 0.02)


@labelled(CASES, Kind.STRAGGLER, 1, num_ranks=2)
def slow_rank_of_interleaved_stages(rank: int) -> None:
    timed_pipeline(rank, 2, name="Interleaved1F1B", stages_per_rank=2, forward_s=0.15 if rank == 1 else 0.03)


@labelled(CASES, Kind.STRAGGLER, 2, num_ranks=4)
def slow_in_a_ring(rank: int) -> None:
    """A value that goes round, to which each adds something."""
    for number in range(12):
        if rank or number:
            disttrain.recv(ones(4), (rank - 1) % 4)
        time.sleep(0.25 if rank == 2 else 0.03)
        disttrain.send(ones(4), (rank + 1) % 4)
    if rank == 0:
        disttrain.recv(ones(4), 3)


@labelled(CASES, Kind.NOTHING_WRONG, num_ranks=4)
def stages_that_compute(rank: int) -> None:
    timed_pipeline(rank, 4, forward_s=0.05, backward_s=0.1)


@labelled(CASES, Kind.NOTHING_WRONG, num_ranks=2)
def interleaved_stages_that_compute(rank: int) -> None:
    timed_pipeline(rank, 2, name="Interleaved1F1B", stages_per_rank=2, forward_s=0.05, backward_s=0.1)


@labelled(CASES, Kind.NOTHING_WRONG)
def all_forwards_first(rank: int) -> None:
    timed_pipeline(rank, 3, name="GPipe", forward_s=0.1, backward_s=0.1)


@labelled(CASES, Kind.NOTHING_WRONG)
def pipeline_that_saves(rank: int) -> None:
    """Rank 0 does, twice."""
    timed_pipeline(rank, 3, forward_s=0.03, backward_s=0.03, between_s=(0.0, 0.7, 0.0, 0.7) if rank == 0 else ())


@labelled(CASES, Kind.NOTHING_WRONG, num_ranks=4)
def stages_that_differ_a_little(rank: int) -> None:
    timed_pipeline(rank, 4, forward_s=0.06 if rank == 2 else 0.05, backward_s=0.12 if rank == 2 else 0.1)
