"""The watchdog in real jobs: a verdict while the job hangs, stacks of a process that cannot run Python, an end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from disttrain.flight_recorder import Dump, Kind, analyze
from disttrain.flight_recorder.dumps.rings.reader import read_ring
from disttrain.store import TCPStore

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

WORLD_SIZE = 2
LIMIT_S = 240.0
JOB = """
import logging
import sys
import torch
import disttrain


def stay():
    sys.stdin.read()  # here


def hold_the_lock():
    # A loop in C that no other thread can interrupt.
    import ctypes

    ctypes.PyDLL(None).sleep(1000)  # held


logging.basicConfig(level=logging.WARNING)
disttrain.init_process_group(timeout=100)
disttrain.all_reduce(torch.ones(4))
print("begun", flush=True)
if disttrain.get_rank() == int(sys.argv[2]):
    {"stay": stay, "hold": hold_the_lock}[sys.argv[1]]()
disttrain.all_reduce(torch.ones(4))  # waiting
disttrain.destroy_process_group()
"""


class Job:
    """Two ranks that run `JOB` with a short soft limit, and a store of their own."""

    def __init__(self, server: ForkServer, folder: Path, case: tuple[str, str], variables: dict[str, str]) -> None:
        self.script = folder / "job.py"
        self.script.write_text(JOB)
        self.dumps = folder / "dumps"
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = [server.start(self.script, *case, environ=self._environ(r, variables)) for r in range(WORLD_SIZE)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.store.close()

    def line_of(self, comment: str) -> int:
        return next(number for number, line in enumerate(JOB.splitlines(), 1) if line.endswith(f"# {comment}"))

    def _environ(self, rank: int, more: dict[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD_SIZE),
            "DISTTRAIN_STORE": f"127.0.0.1:{self.store.port}",
            "MASTER_ADDR": "127.0.0.1",
            "DISTTRAIN_FLIGHT_DIR": str(self.dumps),
            "DISTTRAIN_FLIGHT_SOFT_LIMIT_S": "2",
            **more,
        }


@pytest.fixture
def start(tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(case: str, absent_rank: int = 1, **variables: str) -> Job:
        jobs.append(Job(fork_server, tmp_path, (case, str(absent_rank)), variables))
        return jobs[0]

    yield started
    for job in jobs:
        job.close()


def _once(found: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)  # a process that dumps tells nobody


def _said(job: Job, rank: int, words: str) -> str:
    stderr = job.ranks[rank].stderr
    assert stderr is not None
    return next(line for line in stderr if words in line)


def test_a_verdict_while_the_job_hangs_and_nothing_but_dumps_after_its_end(start: Callable[..., Job]) -> None:
    job = start("stay")
    assert "rank 0 has waited for " in _said(job, 0, "all ranks dump to")
    verdict_line = _said(job, 0, "from the dumps of 2 of 2 ranks")
    assert "Rank 1 did not come to all_reduce #2" in verdict_line
    assert f"job.py:{job.line_of('here')} in stay" in verdict_line
    analysis = analyze(job.dumps)
    assert all(dump.reason.startswith("rank 0 has waited for ") for dump in analysis.dumps)
    assert (analysis.verdicts[0].kind, analysis.verdicts[0].ranks) == (Kind.RANK_ABSENT, (1,))
    first, second = analysis.dumps
    assert first.clock_offset_s is None
    assert second.clock_offset_s is not None
    assert second.clock_error_s is not None
    assert abs(second.clock_offset_s) <= second.clock_error_s + 0.01

    stdin = job.ranks[1].stdin
    assert stdin is not None
    stdin.close()
    job.ranks[1].stdin = None
    assert [rank.wait(LIMIT_S) for rank in job.ranks] == [0, 0]
    assert {file.suffix for file in job.dumps.iterdir()} == {".flight"}


def test_rank_0_gives_the_verdict_of_what_another_finds_also_without_a_folder(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start("stay", 0, DISTTRAIN_FLIGHT_DIR="", TMPDIR=str(tmp_path))
    assert "rank 1 has waited for " in _said(job, 1, "all ranks dump to")
    assert "Rank 0 did not come to all_reduce #2" in _said(job, 0, "from the dumps of 2 of 2 ranks")
    (folder,) = tmp_path.glob("disttrain-flight-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert {file.suffix for file in folder.iterdir()} == {".flight", ".ring", ".stacks"}


def test_another_rank_gives_the_verdict_where_rank_0_cannot(start: Callable[..., Job]) -> None:
    job = start("hold", 0)
    assert "Rank 0 did not come to all_reduce #2" in _said(job, 1, "from the dumps of 2 of 2 ranks")


def test_a_rank_that_holds_the_interpreters_lock_is_seen_in_its_ring(start: Callable[..., Job]) -> None:
    job = start("hold")
    _said(job, 0, "all ranks dump to")

    def left() -> Dump:
        (file,) = job.dumps.glob("rank-00001.*.ring")
        return read_ring(file)

    _once(lambda: bool(left().threads))
    assert left().main_stack[0].line == job.line_of("held")
    verdict = analyze(job.dumps).verdicts[0]
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert f"it holds the interpreter's lock, or is stopped, at {job.script}:{job.line_of('held')}" in verdict.summary


def test_the_process_that_waited_ends_where_that_is_asked_for(start: Callable[..., Job]) -> None:
    job = start("stay", DISTTRAIN_FLIGHT_ENDS_JOB="1")
    assert job.ranks[0].wait(LIMIT_S) == 1
    assert "the flight recorder ends this process" in _said(job, 0, "ends this process")
