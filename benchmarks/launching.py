"""From the command to the first step, and from a fault to its end or the next start: disttrain-launch against torchrun.

    python benchmarks/launching.py [--repeats 7] [--workers 2]

Both start the same script, on gloo; "own library" is the script on disttrain under ours, and on torch.distributed under
torchrun. A step is an all_reduce that all workers have been through; times are of the slowest worker. "first line" is
when Python runs the script's first line, also without any launcher ("bare"). After a kill: until the command has ended
(without restarts), and until the next step is done (with one restart), the latter also as a ratio to the side's own
start. A lost node is a second launcher on this machine that is killed with SIGKILL together with its workers: until the
other node's workers are through their next step, alone. Sides take turns.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness import OURS, TORCH, Row, command_line, finish, row

ROOT = Path(__file__).parents[1]
LIMIT_S = 120.0
STEP_LIMIT_S = 40.0
SCRIPT = """
import os, sys, time
def say(what):
    # In one write: workers of torchrun share a pipe.
    os.write(1, f"\\n{what} {time.time()} {os.getpid()} {os.environ.get('GROUP_RANK', 0)}\\n".encode())
say("line")
if sys.argv[1] == "line":
    sys.exit()
import torch
if sys.argv[1] == "disttrain":
    import disttrain as dist
    dist.init_process_group()
else:
    import torch.distributed as dist
    dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
say("step")
time.sleep(1000 if sys.argv[2] == "stay" else 0)
dist.destroy_process_group()
"""


class NoStepError(Exception):
    """A launcher ended, or its workers do not get on: those of torchrun wait at times for peers that are gone."""


@dataclass(frozen=True)
class Side:
    """A launcher, and what it takes to be told the same as the other."""

    name: str
    command: tuple[str, ...]

    def flags(self, num_workers: int, max_restarts: int, nodes: str, port: int) -> list[str]:
        given = ["--nproc-per-node", str(num_workers), "--max-restarts", str(max_restarts)]
        if nodes == "1":
            return [*given, "--standalone"]
        endpoint = f"127.0.0.1:{port}"
        meeting = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "bench"]
        return [*given, *meeting]


LAUNCH = Side(OURS, (sys.executable, "-m", "disttrain_launch"))
TORCHRUN = Side(TORCH, (sys.executable, "-m", "torch.distributed.run"))


@dataclass
class Run:
    """A running launcher; its workers' words are read as they come."""

    process: subprocess.Popen[bytes]
    began_s: float
    said: list[list[str]] = field(default_factory=list)

    def wait_for(self, what: str, count: int) -> float:
        """When the last of the next `count` workers said it, in seconds since the epoch."""
        times_s: list[float] = []
        assert self.process.stdout is not None
        until_s = time.monotonic() + STEP_LIMIT_S
        while len(times_s) < count:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until_s - time.monotonic()))
            line = self.process.stdout.readline().decode() if ready else ""
            if not line:
                raise NoStepError
            words = line.rpartition("] ")[2].split()
            if words[:1] == [what]:
                times_s.append(float(words[1]))
                self.said.append(words)
        return max(times_s)


class Bench:
    def __init__(self, num_workers: int, folder: Path) -> None:
        self.num_workers = num_workers
        self.runs: list[Run] = []
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("DISTTRAIN_", "PET_"))},
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launcher'}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self, side: Side | None, *argv: str, max_restarts: int = 0, nodes: str = "1", port: int = 0) -> Run:
        launcher = [sys.executable] if side is None else [*side.command]
        flags = [] if side is None else side.flags(self.num_workers, max_restarts, nodes, port)
        began_s = time.time()
        command = [*launcher, *flags, str(self.script), *argv]
        process = subprocess.Popen(
            command,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # what is read is waited for
        )
        self.runs.append(Run(process, began_s))
        return self.runs[-1]

    def clean(self) -> None:
        """End what a trial has left."""
        for run in self.runs:
            if run.process.poll() is None:
                self.end(run)
        self.runs.clear()

    def end(self, run: Run) -> None:
        run.process.send_signal(signal.SIGTERM)
        run.process.communicate(timeout=LIMIT_S)

    def first(self, what: str, side: Side | None, library: str) -> float:
        run = self.start(side, library, "go")
        took_s = run.wait_for(what, 1 if side is None else self.num_workers) - run.began_s
        run.process.communicate(timeout=LIMIT_S)
        return took_s

    def end_after_kill(self, side: Side, library: str) -> float:
        run = self.start(side, library, "stay")
        run.wait_for("step", self.num_workers)
        killed_s = self.kill_one(run)
        run.process.communicate(timeout=LIMIT_S)
        return time.time() - killed_s

    def step_after_kill(self, side: Side, library: str) -> float:
        run = self.start(side, library, "stay", max_restarts=1)
        run.wait_for("step", self.num_workers)
        killed_s = self.kill_one(run)
        took_s = run.wait_for("step", self.num_workers) - killed_s
        self.end(run)
        return took_s

    def step_after_lost_node(self, side: Side, library: str) -> float:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        runs = [self.start(side, library, "stay", max_restarts=3, nodes="1:2", port=port) for _ in range(2)]
        for run in runs:
            run.wait_for("step", self.num_workers)
        # Who has the store is not ours to choose; it has the first group rank.
        runs.sort(key=lambda run: int(run.said[-1][3]))
        killed_s = time.time()
        runs[1].process.kill()
        for _, _, pid, _ in runs[1].said:
            os.kill(int(pid), signal.SIGKILL)
        took_s = runs[0].wait_for("step", self.num_workers) - killed_s
        self.end(runs[0])
        runs[1].process.communicate(timeout=LIMIT_S)
        return took_s

    def kill_one(self, run: Run) -> float:
        killed_s = time.time()
        os.kill(int(run.said[-1][2]), signal.SIGKILL)
        return killed_s


def cases(bench: Bench) -> dict[str, dict[str, Callable[[], float]]]:
    """Measurements by case and side."""
    own = {LAUNCH: "disttrain", TORCHRUN: "torch"}
    sides = (LAUNCH, TORCHRUN)
    return {
        "first line": {
            "bare": lambda: bench.first("line", None, "line"),
            **{side.name: lambda side=side: bench.first("line", side, "line") for side in sides},
        },
        "first step, own library": {
            side.name: lambda side=side: bench.first("step", side, own[side]) for side in sides
        },
        "first step, torch's": {side.name: lambda side=side: bench.first("step", side, "torch") for side in sides},
        "killed worker to command's end": {
            side.name: lambda side=side: bench.end_after_kill(side, own[side]) for side in sides
        },
        "killed worker to next step": {
            side.name: lambda side=side: bench.step_after_kill(side, own[side]) for side in sides
        },
        "lost node to next step": {
            side.name: lambda side=side: bench.step_after_lost_node(side, own[side]) for side in sides
        },
    }


def measure(bench: Bench, num_repeats: int) -> tuple[list[Row], dict[str, int]]:
    """Rows, and how often no step came: by case and side."""
    rows: list[Row] = []
    starts: dict[str, float] = {}
    num_failed: dict[str, int] = {}
    for case, measured in cases(bench).items():
        times_s: dict[str, list[float]] = {name: [] for name in measured}
        # A node's silence takes its time, and the same each time.
        for _ in range(2 if case.startswith("lost") else num_repeats):
            for name, one in measured.items():
                try:
                    times_s[name].append(one())
                except NoStepError:
                    num_failed[f"{case}, {name}"] = num_failed.get(f"{case}, {name}", 0) + 1
                bench.clean()
        times_s = {name: times for name, times in times_s.items() if times}
        rows.append(row(case, "s", times_s))
        if case == "first step, own library":
            starts = {name: statistics.median(times) for name, times in times_s.items()}
        if case == "killed worker to next step":
            again = {name: [each / starts[name] for each in times] for name, times in times_s.items()}
            rows.append(row(case, "own first steps", again))
    return rows, num_failed


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, num_failed = measure(Bench(flags.workers, Path(folder)), flags.repeats)
    finish(rows, flags.json, without_a_step=num_failed)


if __name__ == "__main__":
    main()
