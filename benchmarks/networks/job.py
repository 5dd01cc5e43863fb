"""Ranks started by a benchmark: what each is told, how they meet, and how rank 0 tells what it finds.

Rank 0 writes lines. Those that begin with `@found` are for the benchmark that started it, of a case that is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed
from harness import about, as_json
from networks.turns import Found

import disttrain

PATIENCE_S = 90.0
FOUND = "@found "


def environment(rank: int, num_ranks: int, ranks_per_host: int, address: str, port: int) -> dict[str, str]:
    """A rank's. torch's store is at the port after ours."""
    told = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank % ranks_per_host,
        "LOCAL_WORLD_SIZE": ranks_per_host,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    folders = os.pathsep.join(filter(None, (str(Path(disttrain.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": folders, **{name: str(value) for name, value in told.items()}}


def command(ranks_per_host: int, limit_s: float, *told: str) -> list[str]:
    """This script as a rank that has so long from now, with the options that it was given; of an option that comes
    twice, the last one counts."""
    common = ["--ranks-per-host", str(ranks_per_host), "--until", str(time.time() + limit_s), "--started"]
    return [sys.executable, *sys.argv, *told, *common]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What those that start ranks say to them."""
    parser.add_argument("--ranks-per-host", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--started", action="store_true", help=argparse.SUPPRESS)


@contextmanager
def joined(options: argparse.Namespace) -> Iterator[None]:
    """Both libraries' default groups, over transports of their own."""
    disttrain.init_process_group()
    method = None
    if options.started:
        method = f"tcp://{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"
    place = {"rank": disttrain.get_rank(), "world_size": disttrain.get_world_size()} if method else {}
    torch.distributed.init_process_group("nccl" if options.device == "cuda" else "gloo", init_method=method, **place)
    yield
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


def tell_starter(found: Found) -> None:
    if disttrain.get_rank() == 0:
        print(FOUND + json.dumps(asdict(found)), flush=True)


def keep(found: Sequence[Found], path: Path | None, machine: str = "") -> None:
    """Write what is found by now, where that is wanted."""
    if path is None:
        return
    told = about()
    told["machine"] |= {"name": machine} if machine else {}
    rows = [as_json(each.row) for each in found]
    losses = {each.case: each.losses for each in found}
    path.write_text(json.dumps({"about": told, "rows": rows, "details": {"losses": losses}}, indent=1) + "\n")


class Listener:
    """What becomes of rank 0's lines: cases are shown and kept as they come, others shown.

    All jobs together have `limit_s` from now; one is ended a while after its share of it, whatever it does.
    """

    def __init__(self, keep: Callable[[Sequence[Found]], None], limit_s: float) -> None:
        self._keep, self._end_s = keep, time.monotonic() + limit_s
        self.found: list[Found] = []
        self.problems: list[str] = []

    def share_s(self, num_jobs: int) -> float:
        """Of each of so many jobs that are still to come."""
        return max(0.0, self._end_s - time.monotonic()) / num_jobs

    def add(self, found: Found) -> None:
        print(found.line(), flush=True)
        self.found.append(found)
        self._keep(self.found)

    def follow(self, ranks: Sequence[subprocess.Popen[str]], limit_s: float, end: Callable[[], None]) -> None:
        """Listen until they have ended; `end` ends all of them, once one has failed or time is over."""
        problems: list[str] = []
        first = ranks[0]

        def give_up() -> None:
            problems.append(f"ended {PATIENCE_S:g} s after its time was over")
            end()

        def watch(rank: int, process: subprocess.Popen[str]) -> None:
            assert process.stderr is not None
            said = process.stderr.read() if process is first else process.communicate()[1]
            if process.wait() and not problems:
                problems.append(f"rank {rank} ended with {process.returncode}:\n{said[-3000:]}")
                end()

        watchers = [threading.Thread(target=watch, args=pair, daemon=True) for pair in enumerate(ranks)]
        timer = threading.Timer(min(limit_s + PATIENCE_S, threading.TIMEOUT_MAX), give_up)
        timer.daemon = True
        for started in (timer, *watchers):
            started.start()
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith(FOUND):
                self.add(Found(**json.loads(line.removeprefix(FOUND))))
            else:
                print(line, end="", flush=True)
        for watcher in watchers:
            watcher.join()
        timer.cancel()
        for pipe in (first.stdout, first.stderr):
            if pipe is not None:
                pipe.close()
        for problem in problems:
            print(problem, flush=True)
        self.problems += problems
