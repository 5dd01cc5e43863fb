"""Ranks that do not come, for every reason; the others wait for them in a collective."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

import disttrain
from disttrain.flight_recorder.analysis.verdict import Cause, Kind
from tests.flight_corpus.case import Cases, labelled
from tests.flight_corpus.steps import group_of, step, train
from tests.flight_corpus.tensors import ones

CASES: Cases = []
FOREVER_S = 1000


def absent(*ranks: int, cause: Cause, **more: object):  # type: ignore[no-untyped-def]
    return labelled(CASES, Kind.RANK_ABSENT, *ranks, cause=cause, **more)


@absent(1, cause=Cause.IN_PYTHON, says="asleep")
def sleeps(rank: int) -> None:
    train(5)
    if rank == 1:
        time.sleep(FOREVER_S)
    step()


@absent(0, cause=Cause.IN_PYTHON, says="log_metrics")
def first_rank_sleeps(rank: int) -> None:
    def log_metrics() -> None:
        time.sleep(FOREVER_S)

    train(5)
    if rank == 0:
        log_metrics()
    train(5)


@absent(1, 2, cause=Cause.IN_PYTHON)
def two_ranks_sleep(rank: int) -> None:
    train(5)
    if rank:
        time.sleep(FOREVER_S)
    step()


@absent(2, cause=Cause.IN_PYTHON, says="computing")
def endless_loop(rank: int) -> None:
    train(5)
    while rank == 2:
        pass
    step()


@absent(1, cause=Cause.IN_PYTHON, says="search")
def endless_computation(rank: int) -> None:
    def search() -> None:
        matrix = torch.ones(64, 64)
        while True:
            matrix = matrix @ matrix

    train(5)
    if rank == 1:
        search()
    step()


@absent(1, cause=Cause.IN_PYTHON, says="waiting for a lock")
def lock_that_is_never_released(rank: int) -> None:
    train(5)
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    step()


@absent(1, cause=Cause.IN_IO, says="pipe")
def data_loader_reads_an_empty_pipe(rank: int) -> None:
    train(5)
    if rank == 1:
        reading, _ = os.pipe()
        os.read(reading, 1)
    step()


class _Stuck(IterableDataset[int]):
    """Its fourth item never comes."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        time.sleep(FOREVER_S)


@absent(2, cause=Cause.IN_IO, says="poll")
def data_loader_worker_hangs(rank: int) -> None:
    if rank == 2:
        # Workers that are forked: this process has no other threads but the recorder's.
        batches = iter(DataLoader(_Stuck(), num_workers=1, multiprocessing_context=multiprocessing.get_context("fork")))
    for _ in range(6):
        if rank == 2:
            next(batches)
        step()


@absent(0, cause=Cause.IN_IO, says="wait4")
def waits_for_a_child(rank: int) -> None:
    train(5)
    if rank == 0:
        subprocess.run(["sleep", str(FOREVER_S)], check=True)
    step()


@absent(1, cause=Cause.IN_IO, says="socket")
def server_does_not_answer(rank: int) -> None:
    train(5)
    if rank == 1:
        client, _ = socket.socketpair()
        client.recv(1)
    step()


@absent(1, cause=Cause.IN_IO, says="nobody_connects")
def nobody_connects(rank: int) -> None:
    train(5)
    if rank == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.accept()
    step()


@absent(2, cause=Cause.IN_IO, says="flock")
def file_is_locked(rank: int) -> None:
    train(5)
    if rank == 2:
        with tempfile.NamedTemporaryFile() as first, open(first.name) as second:
            fcntl.flock(first, fcntl.LOCK_EX)
            fcntl.flock(second, fcntl.LOCK_EX)
    step()


@absent(1, cause=Cause.HOLDS_LOCK, says="extension")
def interpreter_lock_held_in_c(rank: int) -> None:
    def extension() -> None:
        ctypes.PyDLL(None).sleep(FOREVER_S)

    train(5)
    if rank == 1:
        extension()
    step()


@absent(2, cause=Cause.HOLDS_LOCK, says="tokenize")
def expression_that_backtracks(rank: int) -> None:
    def tokenize() -> None:
        re.match("(a*)*b", "a" * 60)

    train(5)
    if rank == 2:
        tokenize()
    step()


@absent(1, cause=Cause.STOPPED)
def stopped(rank: int) -> None:
    train(5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    step()


@absent(1, cause=Cause.STOPPED)
def stopped_inside_a_collective(rank: int) -> None:
    train(5)
    if rank == 1:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    else:
        time.sleep(2)
    step()


@absent(0, cause=Cause.STOPPED)
def first_rank_stopped(rank: int) -> None:
    train(5)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    step()


@absent(1, cause=Cause.DEAD)
def killed(rank: int) -> None:
    train(5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step()


@absent(2, cause=Cause.DEAD)
def killed_inside_a_collective(rank: int) -> None:
    train(5)
    if rank == 2:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        time.sleep(2)
    step()


@absent(1, cause=Cause.DEAD)
def crashes(rank: int) -> None:
    train(5)
    if rank == 1:
        ctypes.string_at(0)
    step()


@absent(1, cause=Cause.DEAD)
def exits_at_once(rank: int) -> None:
    train(5)
    if rank == 1:
        os._exit(3)
    step()


@absent(1, cause=Cause.RAISED, says="ValueError (bad batch)")
def raises(rank: int) -> None:
    train(5)
    if rank == 1:
        raise ValueError("bad batch")
    step()


@absent(0, 2, cause=Cause.RAISED, says="FileNotFoundError")
def two_ranks_raise(rank: int) -> None:
    train(5)
    if rank != 1:
        raise FileNotFoundError("shard-7")
    step()


@absent(1, cause=Cause.RAISED, says="MemoryError")
def raises_in_a_group_that_others_wait_for(rank: int) -> None:
    """Rank 0 waits for 2, which waits for 1."""
    train(5)
    first, second = (group_of(0, 2) if rank != 1 else None), (group_of(1, 2) if rank else None)
    if first is not None:
        step(first)
    if second is not None:
        step(second)
        if rank == 1:
            raise MemoryError
        step(second)
    step(first)


@absent(2, cause=Cause.ENDED)
def ends_early(rank: int) -> None:
    train(5 if rank == 2 else 6)
    if rank == 2:
        sys.exit()


@absent(0, cause=Cause.ENDED, says="different lines")
def leaves_out_a_call(rank: int) -> None:
    for number in range(6):
        if rank != 0 or number != 4:
            disttrain.all_reduce(ones(4))
        disttrain.all_reduce(ones(4))


@absent(2, cause=Cause.IN_PYTHON, says="connect")
def late_for_the_first_collective(rank: int) -> None:
    if rank == 2:
        time.sleep(FOREVER_S)
    step()


@absent(1, cause=Cause.STOPPED)
def stopped_before_the_first_collective(rank: int) -> None:
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    step()


@absent(1, cause=Cause.IN_PYTHON, timeout_s=3.0)
def others_gave_up(rank: int) -> None:
    train(5)
    if rank == 1:
        time.sleep(FOREVER_S)
    step()
