"""Judges many operators in processes of their own: one that does not come back costs its process, not the run."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo

from tests.dtensor_ops.infos import all_infos

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Judging:
    """What a worker computes of each operator, what is said of one that is lost, and how a worker gets ready."""

    judge: Callable[[OpInfo], Any]
    hanging: Callable[[OpInfo, str], Any]
    start: Callable[[], None] | None = None


def work(judging: Judging, connection: Any) -> None:
    """Take indices into `op_db` from the connection and send back outcomes, until None comes."""
    torch.set_num_threads(1)
    # Ranks wait for each other all the time; whoever can go on should.
    sys.setswitchinterval(0.0005)
    warnings.simplefilter("ignore")
    if judging.start is not None:
        judging.start()
    while (index := connection.recv()) is not None:
        connection.send(judging.judge(all_infos()[index]))


class _Worker:
    def __init__(self, judging: Judging) -> None:
        self.judging = judging
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=work, args=(judging, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.index: int | None = None
        self.deadline = 0.0

    def give(self, index: int, limit_s: float) -> None:
        self.index = index
        # The first operator waits until torch and the OpInfos are loaded.
        self.deadline = time.monotonic() + limit_s
        self.connection.send(index)

    def outcome(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            self.stop()
            return self.lost(f"the process ended with {self.process.exitcode}")

    def lost(self, text: str) -> Any:
        assert self.index is not None
        return self.judging.hanging(all_infos()[self.index], text)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def judge_all(judging: Judging, indices: Sequence[int], num_workers: int, limit_s: float) -> Iterator[Any]:
    """Outcomes of `op_db` at `indices`, as they come. Past `limit_s` seconds an operator is said to hang."""
    waiting = list(reversed(indices))
    workers = [_Worker(judging) for _ in range(min(num_workers, len(indices)))]
    for worker in workers:
        worker.give(waiting.pop(), limit_s)
    while busy := [worker for worker in workers if worker.index is not None]:
        left_s = min(worker.deadline for worker in busy) - time.monotonic()
        ready = multiprocessing.connection.wait([worker.connection for worker in busy], max(left_s, 0.0))
        for slot, worker in enumerate(workers):
            if worker.index is None:
                continue
            if worker.connection in ready:
                yield worker.outcome()
            elif time.monotonic() >= worker.deadline:
                yield worker.lost(f"no answer within {limit_s:g} s")
                worker.stop()
            else:
                continue
            worker.index = None
            if not worker.process.is_alive():
                workers[slot] = _Worker(judging)
            if waiting:
                workers[slot].give(waiting.pop(), limit_s)
    for worker in workers:
        worker.stop()
