"""What it costs to watch a job: a script's report, and lines on the launcher's screen.

    python benchmarks/launch_screen.py [--repeats 5] [--ranks 4] [--lines 50000]

A report is compared with a datagram to a socket that somebody reads, which is how it could be done with system calls.
Lines of all ranks go into a pipe that is read at once: folded, one by one (`--no-fold`), and by torchrun with `--tee
3`; nothing is folded here, since each line has its rank in it. Runs are interleaved, times medians of whole runs,
starting Python included. Writes benchmarks/results/launch_screen.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

import disttrain
from disttrain import settings
from disttrain.reports import make_page

NUM_REPORTS = 20_000
SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
for number in range(int(sys.argv[1])):
    sys.stdout.write(f"rank {rank} says line {number} of many\\n")
"""


def by_report() -> None:
    for step in range(NUM_REPORTS):
        disttrain.report(step=step, loss=2.5, tokens_per_s=1e5, lr=1e-4)


def by_datagram() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    reader = threading.Thread(target=lambda: [theirs.recv(4096) for _ in range(NUM_REPORTS)])
    reader.start()
    for step in range(NUM_REPORTS):
        ours.send(msgpack.packb([time.time(), {"step": step, "loss": 2.5, "tokens_per_s": 1e5, "lr": 1e-4}]))
    reader.join()
    ours.close()
    theirs.close()


def by_command(num_ranks: int, *command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
    assert done.stdout.count("says line") == num_ranks * int(command[-1])


def interleaved(cases: dict[str, Callable[[], None]], num_repeats: int) -> dict[str, list[float]]:
    """Seconds of each run."""
    times_s: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(num_repeats):
        for name, run in cases.items():
            began_s = time.perf_counter()
            run()
            times_s[name].append(time.perf_counter() - began_s)
    return times_s


def rows(what: str, times_s: dict[str, list[float]], count: int, unit: str, scale: float) -> list[dict[str, Any]]:
    """`unit`: of one of `count`, `scale` times a second."""
    found = []
    for name, runs in times_s.items():
        each = sorted(run / count * scale for run in runs)
        ratio = statistics.median(run / first for run, first in zip(runs, next(iter(times_s.values())), strict=True))
        spread = [round(each[0], 2), round(each[-1], 2)]
        row = {
            "what": what,
            "how": name,
            unit: round(statistics.median(each), 2),
            "spread": spread,
            "ratio": round(ratio, 2),
        }
        print(json.dumps(row))
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lines", type=int, default=50_000)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page, script = Path(folder, "page"), Path(folder, "script.py")
        make_page(page)
        os.environ[settings.REPORT_FILE.name] = str(page)
        script.write_text(SCRIPT)
        reports = interleaved({"report": by_report, "datagram": by_datagram}, flags.repeats)
        job = ("--nproc-per-node", str(flags.ranks))
        ends = (str(script), str(flags.lines))
        commands = {
            "folded": ("disttrain_launch", *job, *ends),
            "one by one": ("disttrain_launch", "--no-fold", *job, *ends),
            "torchrun": ("torch.distributed.run", "--tee", "3", *job, *ends),
        }
        runs: dict[str, Callable[[], None]] = {
            name: lambda command=command: by_command(flags.ranks, *command)  # type: ignore[misc]
            for name, command in commands.items()
        }
        lines = interleaved(runs, flags.repeats)
    found = [
        *rows("report", reports, NUM_REPORTS, "us", 1e6),
        *rows("line", lines, flags.ranks * flags.lines, "us", 1e6),
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    sizes = f"--repeats {flags.repeats} --ranks {flags.ranks} --lines {flags.lines}"
    about = {
        "command": f"python benchmarks/launch_screen.py {sizes}",
        "commit": commit,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    out = Path(__file__).parent / "results" / "launch_screen.json"
    out.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
