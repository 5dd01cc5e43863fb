"""Asynchronous saves by three ranks, of which a training process or a writer is killed with SIGKILL at a random time.

Run as a program, in a process without threads, since it forks its ranks. After each killing, when all writers have
ended, the directory must hold the old or the new state, whole. Prints, as JSON, how often it was which.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

from disttrain.checkpoint import Checkpointer
from disttrain.errors import CheckpointError
from disttrain.process_group import World, entered_world
from disttrain.store import PrefixStore, ServerProcess, TCPStore, spawn_server
from tests.multirank.killed_saves import NUM_RANKS, loaded_step, state_of

NUM_TRIALS = 16
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned writers become our children


def fork_rank(server: ServerProcess, directory: Path, step: int, rank: int, told: int) -> int:
    """A child that saves as `rank` and tells its writer's pid; returns its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        own = TCPStore(server.host, server.port, wait_for_workers=False)
        world = World(PrefixStore(f"step-{step}", own), rank, NUM_RANKS, timeout_s=30.0, device=torch.device("cpu"))
        with entered_world(world):
            checkpointer = Checkpointer(directory)
            pending = checkpointer.async_save(step, state_of(step, rank=rank))
            while checkpointer.writer_pid is None:  # it is started by another thread
                time.sleep(0.001)
            os.write(told, f"{rank} {checkpointer.writer_pid}\n".encode())
            pending.wait()
            checkpointer.close()
        code = 0
    except CheckpointError:
        code = 2
    finally:
        os._exit(code)


def end_all(server: ServerProcess) -> list[int]:
    """Wait for all children but the store's server; returns their exit codes."""
    codes = []
    while {child.pid for child in psutil.Process().children()} - {server.pid}:
        pid, status = os.waitpid(-1, 0)
        assert pid != server.pid
        codes.append(os.waitstatus_to_exitcode(status))
    return codes


def save_and_kill(server: ServerProcess, directory: Path, step: int, whom: str, victim: int, after_s: float) -> bool:
    """Save `step`, and kill somebody. A launcher would end the other ranks after one of them. Returns: whether all
    went well nevertheless."""
    heard, told = os.pipe()
    pids = [fork_rank(server, directory, step, rank, told) for rank in range(NUM_RANKS)]
    os.close(told)
    if whom == "trainer":
        time.sleep(after_s)
        for pid in (pids[victim], *pids):
            os.kill(pid, signal.SIGKILL)
    with os.fdopen(heard) as lines:
        for line in lines:
            rank, pid = line.split()
            if whom == "writer" and int(rank) == victim:
                time.sleep(after_s)
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
    return not any(end_all(server))


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    server = spawn_server("127.0.0.1", 0)
    dice = random.Random(int(sys.argv[2]))
    outcomes: Counter[str] = Counter()
    last = 1
    assert save_and_kill(server, directory, last, "nobody", 0, 0.0)
    for step in range(2, NUM_TRIALS + 2):
        whom = dice.choice(["trainer", "writer"])
        after_s = dice.uniform(0.0, 0.4)
        lived = save_and_kill(server, directory, step, whom, dice.randrange(NUM_RANKS), after_s)
        found = loaded_step(directory)
        assert found == step if lived else found in {last, step}, (found, last, step)
        outcomes[f"{whom}: {'lived' if lived else 'new' if found == step else 'old'}"] += 1
        last = found
    assert save_and_kill(server, directory, NUM_TRIALS + 2, "nobody", 0, 0.0)
    left = sorted(os.listdir(directory))
    assert left == [f"step-{step:08d}" for step in (last, NUM_TRIALS + 2)], left
    server.close()
    shutil.rmtree(directory)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
