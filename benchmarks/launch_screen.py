"""What it costs to watch a job: a script's report, and lines on the launcher's screen.

    python benchmarks/launch_screen.py [--repeats 5] [--ranks 4] [--lines 50000]

A report is compared with a datagram to a socket that somebody reads, which is how it could be done with system calls.
Lines of all ranks go into a pipe that is read at once: folded, one by one (`--no-fold`), and by torchrun with `--tee
3`; nothing is folded here, since each line has its rank in it. Runs are interleaved, times medians of whole runs,
starting Python included.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgpack
from harness import OURS, TORCH, command_line, finish, in_turns, row

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


def timed(run: Callable[[], None]) -> float:
    """Seconds."""
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lines", type=int, default=50_000)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page, script = Path(folder, "page"), Path(folder, "script.py")
        make_page(page)
        os.environ[settings.REPORT_FILE.name] = str(page)
        script.write_text(SCRIPT)
        reports = in_turns({OURS: partial(timed, by_report), "datagram": partial(timed, by_datagram)}, flags.repeats)
        job = ("--nproc-per-node", str(flags.ranks))
        ends = (str(script), str(flags.lines))
        commands = {
            OURS: ("disttrain_launch", *job, *ends),
            "one by one": ("disttrain_launch", "--no-fold", *job, *ends),
            TORCH: ("torch.distributed.run", "--tee", "3", *job, *ends),
        }
        runs = {name: partial(by_command, flags.ranks, *command) for name, command in commands.items()}
        lines = in_turns({name: partial(timed, run) for name, run in runs.items()}, flags.repeats)
    rows = [
        row("a report", "us", reports, 1e6 / NUM_REPORTS),
        row("a worker's line", "us", lines, 1e6 / (flags.ranks * flags.lines)),
    ]
    finish(rows, flags.json)


if __name__ == "__main__":
    main()
