"""Faults of GPUs: the host has left its collectives, and what was queued does not end."""

from __future__ import annotations

import time

import torch

import disttrain
from disttrain.flight_recorder.analysis.verdict import Cause, Kind
from tests.flight_corpus.case import NCCL, Cases, labelled
from tests.flight_corpus.steps import step, train
from tests.flight_corpus.tensors import ones

CASES: Cases = []
MINUTE_CYCLES = 120_000_000_000
LATE_CYCLES = 600_000_000
"""Some 0.3 s."""


def on_gpus(kind: Kind, *ranks: int, **more: object):  # type: ignore[no-untyped-def]
    return labelled(CASES, kind, *ranks, backend=NCCL, **more)


def _loss(value: float = 1.0) -> float:
    """As a script logs it: the host waits for the device here."""
    total = ones(1) * value
    disttrain.all_reduce(total)
    return float(total)


@on_gpus(Kind.RANK_ABSENT, 1, cause=Cause.IN_KERNEL, says="optimizer_step")
def kernel_that_does_not_end(rank: int) -> None:
    """The host waits for it before it comes to the collective."""

    def optimizer_step() -> None:
        torch.cuda._sleep(MINUTE_CYCLES)
        torch.cuda.synchronize()

    train(5)
    _loss()
    if rank == 1:
        optimizer_step()
    _loss()


@on_gpus(Kind.NEVER_STARTED, 1)
def kernel_that_does_not_end_before_a_collective(rank: int) -> None:
    """The host has come to the collective, the device has not."""
    train(5)
    _loss()
    if rank == 1:
        torch.cuda._sleep(MINUTE_CYCLES)
    _loss()


@on_gpus(Kind.NEVER_STARTED, 2)
def stream_that_waits_for_an_event(rank: int) -> None:
    """Of a stream that does not get there."""
    train(5)
    if rank == 2:
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            torch.cuda._sleep(MINUTE_CYCLES)
            event = other.record_event()
        torch.cuda.current_stream().wait_event(event)
    train(3)
    _loss()


@on_gpus(Kind.NEVER_STARTED, 0)
def kernel_that_does_not_end_before_a_message(rank: int) -> None:
    train(5)
    _loss()
    if rank == 0:
        torch.cuda._sleep(MINUTE_CYCLES)
        disttrain.send(ones(4), 1)
    elif rank == 1:
        disttrain.recv(ones(4), 0)
    _loss()


@on_gpus(Kind.RANK_ABSENT, 0, cause=Cause.IN_PYTHON, says="log_metrics")
def others_read_the_loss(rank: int) -> None:
    def log_metrics() -> None:
        time.sleep(1000)

    for _ in range(5):
        _loss()
    if rank == 0:
        log_metrics()
    _loss()


@on_gpus(Kind.RANK_ABSENT, 1, cause=Cause.RAISED)
def index_beyond_a_table(rank: int) -> None:
    """The device's own assertion, which the host hears of later."""
    train(5)
    table = ones(8, 4)
    places = torch.tensor([1, 99 if rank == 1 else 2], device=table.device)
    _loss(float(table[places].sum()))
    step()


@on_gpus(Kind.STRAGGLER, 2)
def slow_kernels(rank: int) -> None:
    for _ in range(12):
        if rank == 2:
            torch.cuda._sleep(LATE_CYCLES)
        _loss()


@on_gpus(Kind.NOTHING_WRONG)
def host_that_runs_ahead(_rank: int) -> None:
    """Of kernels that take seconds."""
    for _ in range(12):
        torch.cuda._sleep(LATE_CYCLES)
        step()


@on_gpus(Kind.NOTHING_WRONG)
def losses_are_read(_rank: int) -> None:
    for number in range(30):
        _loss(number)
