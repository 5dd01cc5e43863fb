"""Judges many operators in processes of their own: one that does not come back costs its process, not the run."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.dtensor_ops.infos import all_infos
from tests.dtensor_ops.judge import Outcome, judge

_SPAWN = multiprocessing.get_context("spawn")


def work(connection: Any) -> None:
    """Take places in `op_db` from the connection and send back outcomes, until None comes."""
    torch.set_num_threads(1)
    # Ranks wait for each other all the time; whoever can go on should.
    sys.setswitchinterval(0.0005)
    warnings.simplefilter("ignore")
    while (place := connection.recv()) is not None:
        connection.send(judge(all_infos()[place]))


class _Worker:
    def __init__(self) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.place: int | None = None
        self.deadline = 0.0

    def give(self, place: int, limit_s: float) -> None:
        self.place = place
        # The first operator waits until torch and the OpInfos are loaded.
        self.deadline = time.monotonic() + limit_s
        self.connection.send(place)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def judge_all(places: Sequence[int], num_workers: int, limit_s: float) -> Iterator[Outcome]:
    """Outcomes of `op_db` at `places`, as they come. Past `limit_s` seconds an operator is said to hang."""
    waiting = list(reversed(places))
    workers = [_Worker() for _ in range(min(num_workers, len(places)))]
    for worker in workers:
        worker.give(waiting.pop(), limit_s)
    while busy := [worker for worker in workers if worker.place is not None]:
        left_s = min(worker.deadline for worker in busy) - time.monotonic()
        ready = multiprocessing.connection.wait([worker.connection for worker in busy], max(left_s, 0.0))
        for place, worker in enumerate(workers):
            if worker.place is None:
                continue
            if worker.connection in ready:
                yield _received(worker)
            elif time.monotonic() >= worker.deadline:
                yield _lost(worker.place, f"no answer within {limit_s:g} s")
                worker.stop()
            else:
                continue
            worker.place = None
            if not worker.process.is_alive():
                workers[place] = _Worker()
            if waiting:
                workers[place].give(waiting.pop(), limit_s)
    for worker in workers:
        worker.stop()


def _received(worker: _Worker) -> Outcome:
    assert worker.place is not None
    try:
        outcome: Outcome = worker.connection.recv()
    except EOFError:
        worker.stop()
        return _lost(worker.place, f"the process ended with {worker.process.exitcode}")
    return outcome


def _lost(place: int, text: str) -> Outcome:
    info = all_infos()[place]
    return Outcome(f"{info.name} {info.variant_test_name}".strip(), 1, set(), [("hangs", text)])
