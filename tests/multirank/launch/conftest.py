"""Run the real command on small scripts, and see that nothing of it is left."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.forkserver.process import ForkedProcess
from tests.surroundings.launching import launcher_arguments

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

ROOT = Path(__file__).parents[3]
MARK = "DISTTRAIN_TEST_JOB"
LIMIT_S = 240.0


@dataclass(frozen=True)
class Ended:
    """A launcher that has ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()


@dataclass
class Launches:
    """Starts launchers in a folder of their own; each carries `mark` into everything that it starts."""

    folder: Path
    launcher_fork_server: ForkServer
    """Forks launchers."""
    server: ForkServer | None = None
    """Forks workers; None: each loads for itself what it needs."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script and return its name."""
        (self.folder / name).write_text(dedent(text))
        return name

    def start(self, *argv: str, **environ: str) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] = ForkedProcess(
            self.launcher_fork_server,
            [*launcher_arguments(None if self.server is None else self.server.address), *argv],
            cwd=self.folder,
            env={**self.environ(), **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *argv: str, **environ: str) -> Ended:
        return self.end(self.start(*argv, **environ))

    def end(self, process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Ended:
        stdout, stderr = process.communicate(timeout=limit_s)
        return Ended(process.returncode, stdout, stderr)

    def ready(self, process: subprocess.Popen[str], num_lines: int) -> list[str]:
        """Wait for so many lines of its stdout; workers print when they are ready."""
        assert process.stdout is not None
        return [process.stdout.readline() for _ in range(num_lines)]

    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISTTRAIN_", "OMP_"))}
        path = os.pathsep.join([str(ROOT), str(ROOT / "launcher"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        ours = {"PYTHONPATH": path, "TMPDIR": str(self.folder), "CUDA_VISIBLE_DEVICES": "", MARK: self.mark}
        # Whether ranks say the same at the same time depends on the machine.
        return {**kept, **ours, "DISTTRAIN_LAUNCH_NO_FOLD": "1"}

    def living(self) -> list[psutil.Process]:
        """Every live process that a launcher of this test started, directly or not."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def wait_gone(self, limit_s: float) -> list[psutil.Process]:
        """Wait until none lives; returns those that do. One that a test has killed may stay, as a zombie."""
        deadline_s = time.monotonic() + limit_s
        while (living := self.living()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return living

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False


@pytest.fixture
def port() -> int:
    """One that nobody listens on, and that nobody gets who takes any: those are from 32768 on."""
    while True:
        number = secrets.choice(range(10_000, 32_768))
        with suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number


@pytest.fixture
def launches(tmp_path: Path, launcher_fork_server: ForkServer) -> Iterator[Launches]:
    """Afterwards no process and no temporary folder of any launcher is left."""
    launches = Launches(tmp_path, launcher_fork_server)
    yield launches
    _end(launches)


@pytest.fixture
def forked_launches(tmp_path: Path, launcher_fork_server: ForkServer, fork_server: ForkServer) -> Iterator[Launches]:
    """For workers that need torch, where it is not their starting and ending that is looked at."""
    launches = Launches(tmp_path, launcher_fork_server, fork_server)
    yield launches
    _end(launches)


def _end(launches: Launches) -> None:
    for process in launches.started:
        process.kill()
        process.wait()
    names = []
    for left in launches.wait_gone(60.0):
        with suppress(psutil.NoSuchProcess):
            names.append(" ".join(left.cmdline()))
            left.send_signal(signal.SIGKILL)
    for place, process in enumerate(launches.started):
        # After those that are left: what is stopped holds pipes, and keeps them open. Seen where the test has failed.
        stdout, stderr = process.communicate()
        print(f"--- launcher {place}, exit code {process.returncode}\n{stdout}{stderr}")
    assert names == []
    assert list(launches.folder.glob("disttrain-*")) == []
