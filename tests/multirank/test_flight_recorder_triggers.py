"""What makes a process write its dump: SIGUSR2 while it hangs in C++, an uncaught exception, its end; not SIGKILL."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from disttrain.flight_recorder import Dump, Kind, Verdict, analyze, enable
from disttrain.flight_recorder.analysis.verdict import Cause
from disttrain.flight_recorder.record.record import State
from disttrain.process_group import World, entered_world
from disttrain.settings import FLIGHT_DIR
from disttrain.store import HashStore, TCPStore

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

WORLD_SIZE = 3
LIMIT_S = 240.0
JOB = """
import os
import sys
import torch
import disttrain


def leave():
    if sys.argv[1] == "raise":
        raise ValueError("bad batch")
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), 9)
    sys.stdin.read()  # here


disttrain.init_process_group(timeout=60)
disttrain.all_reduce(torch.ones(4))
print("begun", flush=True)
if disttrain.get_rank() == 1:
    leave()
disttrain.all_reduce(torch.ones(4))  # waiting
"""


class Job:
    """Three ranks that run `JOB`, with a store of their own."""

    def __init__(self, server: ForkServer, folder: Path, case: str) -> None:
        script = folder / "job.py"
        script.write_text(JOB)
        self.dumps = folder / "dumps" / "of this job"
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = [server.start(script, case, environ=self._environ(rank)) for rank in range(WORLD_SIZE)]

    def end(self) -> list[int]:
        """The exit codes of all ranks, once they are gone."""
        return [rank.wait(LIMIT_S) for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.store.close()

    def line_of(self, comment: str) -> str:
        number = next(number for number, line in enumerate(JOB.splitlines(), 1) if line.endswith(f"# {comment}"))
        return f"job.py:{number} in "

    def diagnosis(self) -> tuple[list[Dump], Verdict]:
        analysis = analyze(self.dumps)
        assert len(analysis.verdicts) == 1
        return list(analysis.dumps), analysis.verdicts[0]

    def _environ(self, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD_SIZE),
            "DISTTRAIN_STORE": f"127.0.0.1:{self.store.port}",
            "MASTER_ADDR": "127.0.0.1",
            FLIGHT_DIR.name: str(self.dumps),
        }


@pytest.fixture
def job(tmp_path: Path, fork_server: ForkServer, request: pytest.FixtureRequest) -> Iterator[Job]:
    running = Job(fork_server, tmp_path, request.param)
    yield running
    running.close()


@pytest.mark.parametrize("job", ["stay"], indirect=True)
def test_a_signal_while_the_job_hangs_and_its_end(job: Job) -> None:
    for rank in job.ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "begun\n"
    time.sleep(1.5)  # a shorter wait is no hang
    for rank in job.ranks:
        rank.send_signal(signal.SIGUSR2)
    deadline_s = time.monotonic() + LIMIT_S
    while len(list(job.dumps.glob("*.flight"))) < WORLD_SIZE and time.monotonic() < deadline_s:
        time.sleep(0.02)  # a process that dumps tells nobody
    dumps, verdict = job.diagnosis()
    assert [(dump.rank, dump.pid, dump.reason) for dump in dumps] == [
        (number, rank.pid, "SIGUSR2") for number, rank in enumerate(job.ranks)
    ]
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert job.line_of("waiting") in verdict.summary
    assert verdict.cause is Cause.IN_IO
    assert "it waits in a system call (read of pipe:[" in verdict.summary
    assert f" at {job.dumps.parents[1]}/{job.line_of('here')}leave" in verdict.summary

    stdin = job.ranks[1].stdin
    assert stdin is not None
    stdin.close()
    job.ranks[1].stdin = None
    assert job.end() == [0, 0, 0]
    dumps, verdict = job.diagnosis()
    assert [dump.reason for dump in dumps] == ["exit"] * WORLD_SIZE
    assert verdict.kind is Kind.NOTHING_WRONG


@pytest.mark.parametrize("job", ["raise"], indirect=True)
def test_a_rank_raises(job: Job) -> None:
    assert job.end() == [1, 1, 1]
    stderr = job.ranks[1].stderr
    assert stderr is not None
    assert stderr.read().endswith("ValueError: bad batch\n")
    dumps, verdict = job.diagnosis()
    assert [dump.reason for dump in dumps] == ["uncaught exception"] * WORLD_SIZE
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert "it ended with ValueError (bad batch) at " in verdict.summary


@pytest.mark.parametrize("job", ["kill"], indirect=True)
def test_a_rank_is_killed(job: Job) -> None:
    assert job.end() == [1, -signal.SIGKILL, 1]
    dumps, verdict = job.diagnosis()
    assert [(dump.rank, dump.reason) for dump in dumps] == [
        (0, "uncaught exception"),
        (1, "ring"),
        (2, "uncaught exception"),
    ]
    assert [(record.site.operation, record.state) for record in dumps[1].records] == [("all_reduce", State.COMPLETED)]
    assert {file.name.split(".")[0] for file in job.dumps.glob("*.ring")} == {"rank-00001"}
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert "it left no dump but its last records" in verdict.summary


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FLIGHT_DIR.name, str(tmp_path / "file" / "dumps"))
    with entered_world(World(HashStore(), 0, 1, backend="fake", timeout_s=1.0)) as world:
        assert enable(world).ring.file is not None
        assert enable(world) is world.recorder
    assert re.search(r"DISTTRAIN_FLIGHT_DIR='.*' cannot be made: Not a directory", caplog.text)
