"""Asynchronous saves by three ranks, of which a training process or a writer is killed with SIGKILL at a random time.

Run as a program, in a process without threads, since it forks its ranks; the fork server at WRITERS forks its writers
(`tests/forkserver/writers.py`). After each killing, when all writers have ended, the directory must hold the old or the
new state, whole. Prints, as JSON, how often it was which.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import torch

from disttrain.checkpoint import Checkpointer
from disttrain.errors import CheckpointError
from disttrain.process_group import World, entered_world
from disttrain.store import PrefixStore, ServerProcess, TCPStore, spawn_server
from tests.forkserver.process import WRITERS, ForkServer
from tests.multirank.killed_saves import NUM_RANKS, fork, loaded_step, state_of

RUN = "KILLED_SAVES_RUN"
"""The variable by which this program's writers are known."""
NUM_TRIALS = 16
FIRST_TRIAL = 3
"""Before, nobody is killed: that tells how long a save takes here."""


def fork_rank(server: ServerProcess, directory: Path, step: int, rank: int, told: int) -> int:
    """A child that saves as `rank` and tells its writer's pid; returns its own."""
    pid = fork()
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


def save_and_kill(
    server: ServerProcess, writers: str, directory: Path, step: int, whom: str, victim: int, after_s: float
) -> bool:
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
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    with closing(ForkServer(writers)) as forks:
        forks.settle({RUN: os.environ[RUN]})
    return not any(codes)


def main() -> None:
    directory, dice, writers = Path(sys.argv[1]), random.Random(int(sys.argv[2])), os.environ[WRITERS]
    torch.set_num_threads(1)
    os.environ[RUN] = str(directory)
    server = spawn_server("127.0.0.1", 0)
    outcomes: Counter[str] = Counter()
    times_s = []
    for step in range(1, FIRST_TRIAL):
        started_s = time.monotonic()
        assert save_and_kill(server, writers, directory, step, "nobody", 0, 0.0)
        times_s.append(time.monotonic() - started_s)
    within_s, last = min(times_s), FIRST_TRIAL - 1
    for step in range(FIRST_TRIAL, FIRST_TRIAL + NUM_TRIALS):
        whom = dice.choice(["trainer", "writer"])
        after_s = dice.uniform(0.0, within_s)
        lived = save_and_kill(server, writers, directory, step, whom, dice.randrange(NUM_RANKS), after_s)
        if lived:  # the first saves were slower
            within_s *= 0.7
        found = loaded_step(directory)
        assert found == step if lived else found in {last, step}, (found, last, step)
        outcomes[f"{whom}: {'lived' if lived else 'new' if found == step else 'old'}"] += 1
        last = found
    final = FIRST_TRIAL + NUM_TRIALS
    assert save_and_kill(server, writers, directory, final, "nobody", 0, 0.0)
    left = sorted(os.listdir(directory))
    assert left == [f"step-{step:08d}" for step in (last, final)], left
    server.close()
    shutil.rmtree(directory)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
