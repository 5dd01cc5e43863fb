"""What copies in memory cost a save, and what they save a restart: two ranks as two nodes, in turns, medians.

    python benchmarks/checkpoint_memory.py [--mib 256] [--rounds 5] [--directory DIR]

"stall" is the time until `async_save` returns, "commit" until the save is on the disk, with and without copies; both of
the slowest rank. A load brings all bytes: "memory" with every copy there, "one node lost" with those of the second node
removed, "disk" with all copies removed and the files dropped from the page cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import command_line, finish, row

from disttrain import barrier, get_rank, get_world_size, init_device_mesh
from disttrain.checkpoint import Checkpointer, PeerMemory
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.testing import RankPool

NUM_TENSORS = 16
WARM_UP = 2


def state_of(mib: int) -> dict[str, Any]:
    """So many MiB per rank."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    rows = get_world_size() * mib * 256 // NUM_TENSORS
    return {
        f"layer{number}": distribute_tensor(torch.rand(rows, 1024), mesh, [Shard(0)], src_data_rank=None)
        for number in range(NUM_TENSORS)
    }


def memory_of(root: str) -> PeerMemory:
    return PeerMemory(f"{root}/node-{get_rank()}", ranks_per_node=1)


def saves(disk: str, memory: str, mib: int, rounds: int) -> list[list[float]]:
    """Stall and commit, without and with copies, of each round."""
    state, taken = state_of(mib), []
    plain = Checkpointer(f"{disk}/plain", keep=1)
    copied = Checkpointer(f"{disk}/copied", keep=1, peer_memory=memory_of(memory))
    with plain, copied:
        for step in range(rounds + WARM_UP):
            row = []
            for checkpointer in (plain, copied):
                barrier()
                start_s = time.perf_counter()
                pending = checkpointer.async_save(step, state)
                row.append(time.perf_counter() - start_s)
                pending.result()
                row.append(time.perf_counter() - start_s)
            taken.append(row)
    return taken[WARM_UP:]


def loads(disk: str, memory: str, mib: int) -> float:
    state = state_of(mib)
    checkpointer = Checkpointer(f"{disk}/copied", peer_memory=memory_of(memory))
    barrier()
    start_s = time.perf_counter()
    checkpointer.load(state)
    return time.perf_counter() - start_s


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(pool: RankPool, disk: Path, memory: Path, mib: int, rounds: int) -> dict[str, list[float]]:
    places = {"disk": str(disk), "memory": str(memory), "mib": mib}
    names = ("stall: disk", "commit: disk", "stall: and memory", "commit: and memory")
    by_rank = pool.run(2, saves, {**places, "rounds": rounds}, timeout_s=600.0)
    taken = {
        name: [max(row[column] for row in rows) for rows in zip(*by_rank, strict=True)]
        for column, name in enumerate(names)
    }
    taken.update({"load: memory": [], "load: one node lost": [], "load: disk": []})
    away = memory / "away"
    away.mkdir()
    for _ in range(rounds):
        for name, lost in (("load: memory", []), ("load: one node lost", [1]), ("load: disk", [0, 1])):
            for node in lost:
                (memory / f"node-{node}").rename(away / f"node-{node}")
            forget(disk)
            taken[name].append(max(pool.run(2, loads, places, timeout_s=600.0)))
            for node in lost:
                (away / f"node-{node}").rename(memory / f"node-{node}")
    return taken


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk; default: a temporary one")
    options = parser.parse_args()
    disk = Path(tempfile.mkdtemp(dir=options.directory))
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="disttrain-benchmark-"))
    pool = RankPool()
    try:
        taken = measure(pool, disk, memory, options.mib, options.rounds)
    finally:
        pool.close()
        shutil.rmtree(disk)
        shutil.rmtree(memory)
    by_case: dict[str, dict[str, list[float]]] = {}
    for name, times_s in taken.items():
        case, _, side = name.partition(": ")
        by_case.setdefault(case, {})[side] = times_s
    finish([row(case, "s", sides) for case, sides in by_case.items()], options.json)


if __name__ == "__main__":
    main()
