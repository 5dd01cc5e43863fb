"""Saves by three ranks that are killed with SIGKILL: at each of their file operations in turn, and at random times.

Run as a program, in a process without threads, since it forks its ranks: that costs a thousandth of starting them.
After each killing the directory must hold the old or the new state, whole. Prints, as JSON, how often it was which.
Arguments: the directory, a seed, and how: "steps" of a Checkpointer, or a save over the last one where two folders can
"exchange" their places, or where they can only "rename".
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint import Checkpointer, LocalStorage, PerRank, load, save
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.mesh import init_device_mesh
from disttrain.process_group import World, entered_world
from disttrain.store import PrefixStore, ServerProcess, TCPStore, spawn_server

NUM_RANKS = 3
NEVER = 1 << 30
NUM_RANDOM = 6
"""Kills at random times, after those at each operation."""


class Deadly(LocalStorage):
    """Kills its process before its operation number `dies_at`; writes and removals are several operations."""

    def __init__(self, dies_at: int, how: str) -> None:
        self.left = dies_at
        self._how = how

    def tick(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def make_folder(self, path: Path) -> None:
        self.tick()
        super().make_folder(path)
        self.tick()

    def write_file(self, path: Path, parts: Iterable[memoryview]) -> None:
        def halves() -> Iterator[memoryview]:
            for number, part in enumerate(parts):
                for half in (part[: len(part) // 2], part[len(part) // 2 :]):
                    if number == 0 or self._how == "steps":  # as a file is written, whatever comes of it
                        self.tick()
                    yield half
            self.tick()

        super().write_file(path, halves())
        self.tick()

    def sync_folder(self, path: Path) -> None:
        self.tick()
        super().sync_folder(path)

    def move(self, source: Path, target: Path) -> None:
        self.tick()
        super().move(source, target)
        self.tick()

    def exchange(self, one: Path, other: Path) -> bool:
        self.tick()
        done = self._how == "exchange" and super().exchange(one, other)
        self.tick()
        return done

    def remove_folder(self, path: Path) -> None:
        for file in sorted(path.iterdir()):
            self.tick()
            file.unlink()
        self.tick()
        super().remove_folder(path)


def state_of(step: int, *, rank: int | None) -> dict[str, Any]:
    """A state in which everything is `step`; on a mesh, or plain for one process."""
    weight = torch.full((7, 300), float(step))
    if rank is not None:
        weight = distribute_tensor(weight, init_device_mesh("cpu", (NUM_RANKS,)), [Shard(0)], src_data_rank=None)
    plain = {f"p{place}": torch.full((100,), step) for place in range(5)}
    return {"w": weight, "plain": plain, "step": step, "own": PerRank(step)}


def loaded_step(directory: Path, how: str = "steps") -> int:
    """The step in the latest save, after a look at every element of it."""
    state = state_of(-1, rank=None)
    if how == "steps":
        step = Checkpointer(directory).load(state)
    else:
        load(state, directory / "save")
        step = state["step"]
    assert state["w"].eq(step).all()
    assert all(tensor.eq(step).all() for tensor in state["plain"].values())
    assert (state["step"], state["own"].value) == (step, step)
    return step


def fork() -> int:
    """As os.fork. Python 3.12 warns of threads beside it: here of some that are on their way out, and of OpenBLAS's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def fork_rank(server: ServerProcess, directory: Path, how: str, step: int, rank: int, dies_at: int) -> int:
    """A child that saves as `rank`; returns its pid."""
    pid = fork()
    if pid:
        return pid
    try:
        own = TCPStore(server.host, server.port, wait_for_workers=False)
        world = World(PrefixStore(f"step-{step}", own), rank, NUM_RANKS, timeout_s=30.0, device=torch.device("cpu"))
        storage = Deadly(dies_at, how)
        with entered_world(world), Checkpointer(directory, storage=storage) as checkpointer:
            if how == "steps":
                checkpointer.save(step, state_of(step, rank=rank))
            else:
                save(state_of(step, rank=rank), directory / "save", storage=storage, overwrite=True)
        os._exit(0)
    finally:
        os._exit(1)


def save_and_kill(
    server: ServerProcess, directory: Path, how: str, step: int, victim: int, dies_at: int, after_s: float
) -> bool:
    """Save `step`. The others die after the victim, as a launcher sees to it. Returns whether all lived to the end."""
    deaths = [dies_at if rank == victim else NEVER for rank in range(NUM_RANKS)]
    pids = [fork_rank(server, directory, how, step, rank, deaths[rank]) for rank in range(NUM_RANKS)]
    if after_s:
        time.sleep(after_s)
        os.kill(pids[victim], signal.SIGKILL)
    lived = os.waitstatus_to_exitcode(os.waitpid(pids[victim], 0)[1]) == 0
    others = [pid for rank, pid in enumerate(pids) if rank != victim]
    if not lived:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others]
    if lived and codes != [0, 0]:
        raise SystemExit(f"step {step}: a rank failed: {codes}")
    return lived


def main() -> None:
    directory, how = Path(sys.argv[1]), sys.argv[3]
    torch.set_num_threads(1)
    server = spawn_server("127.0.0.1", 0)
    dice = random.Random(int(sys.argv[2]))
    outcomes: Counter[str] = Counter()
    steps = iter(range(1, NEVER))
    last = next(steps)
    assert save_and_kill(server, directory, how, last, 0, NEVER, 0.0)

    def trial(victim: int, dies_at: int, after_s: float) -> bool:
        nonlocal last
        step = next(steps)
        lived = save_and_kill(server, directory, how, step, victim, dies_at, after_s)
        found = loaded_step(directory, how)
        assert found == step if lived else found in {last, step}, (found, last, step)
        outcomes["lived" if lived else "new" if found == step else "old"] += 1
        last = found
        return lived

    # Only rank 0 moves folders, so that of the others there is as much to see in one way as in each.
    for victim in (0, 1) if how == "steps" else (0,):
        dies_at = 0
        while not trial(victim, dies_at, 0.0):
            dies_at += 1
    for _ in range(NUM_RANDOM):
        trial(dice.randrange(NUM_RANKS), NEVER, dice.uniform(0.005, 0.06))
    final = next(steps)
    assert save_and_kill(server, directory, how, final, 0, NEVER, 0.0)
    left = sorted(os.listdir(directory))
    expected = [f"step-{step:08d}" for step in (last, final)] if how == "steps" else ["save"]
    assert left == expected, left
    server.close()
    shutil.rmtree(directory)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
