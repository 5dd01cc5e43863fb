"""Jobs that move, but wait for one rank."""

from __future__ import annotations

import time

import torch

import disttrain
from disttrain.flight_recorder.analysis.verdict import Kind
from tests.flight_corpus.case import Cases, labelled
from tests.flight_corpus.steps import group_of, step
from tests.flight_corpus.tensors import ones
from tests.flight_corpus.training import sharded

CASES: Cases = []
NUM_STEPS = 12
LATE_S = 0.3


@labelled(CASES, Kind.STRAGGLER, 1)
def slow_data(rank: int) -> None:
    for _ in range(NUM_STEPS):
        if rank == 1:
            time.sleep(LATE_S)
        step()


@labelled(CASES, Kind.STRAGGLER, 2)
def slow_device(rank: int) -> None:
    for _ in range(NUM_STEPS):
        end_s = time.monotonic() + (LATE_S if rank == 2 else 0.01)
        while time.monotonic() < end_s:
            torch.ones(32, 32) @ torch.ones(32, 32)
        step()


@labelled(CASES, Kind.STRAGGLER, 0)
def slow_first_rank(rank: int) -> None:
    for number in range(NUM_STEPS):
        if rank == 0 and number % 2:
            time.sleep(2 * LATE_S)
        disttrain.all_gather_into_tensor(ones(12), ones(4))


@labelled(CASES, Kind.STRAGGLER, 3, num_ranks=4)
def slow_in_a_group(rank: int) -> None:
    group = group_of(0, 1) if rank < 2 else group_of(2, 3)
    for _ in range(NUM_STEPS):
        if rank == 3:
            time.sleep(LATE_S)
        step(group)


@labelled(CASES, Kind.STRAGGLER, 1, is_signalled=True)
def slow_while_it_runs(rank: int) -> None:
    for _ in range(60):
        if rank == 1:
            time.sleep(LATE_S)
        step()


@labelled(CASES, Kind.STRAGGLER, 2)
def slow_layer(rank: int) -> None:
    def hook(_num_passes: int) -> None:
        if rank == 2:
            time.sleep(LATE_S)

    sharded(rank, NUM_STEPS, hook=hook)


@labelled(CASES, Kind.STRAGGLER, 2, timeout_s=3.0)
def comes_when_the_others_gave_up(rank: int) -> None:
    for _ in range(5):
        step()
    if rank == 2:
        time.sleep(6)
    step()
