"""Who is left when a rank is killed in the midst of a save: how long until each raises, and what. Prints JSON.

Run as a program, in a process without threads, since it forks its ranks. All cases run at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from disttrain.checkpoint import save
from disttrain.errors import CheckpointError
from disttrain.process_group import World, entered_world
from disttrain.store import PrefixStore, ServerProcess, TCPStore, spawn_server
from tests.multirank.killed_saves import NEVER, NUM_RANKS, Deadly, fork, state_of

VICTIMS = {0: 4, 1: 1, 2: 1}
"""Each case's victim, and the operation before which it dies: rank 0 while it commits, the others as they write."""


def run_rank(server: ServerProcess, directory: Path, victim: int, rank: int) -> None:
    """Save as `rank`, and write down how it ended."""
    own = TCPStore(server.host, server.port, wait_for_workers=False)
    world = World(PrefixStore(f"case-{victim}", own), rank, NUM_RANKS, timeout_s=60.0, device=torch.device("cpu"))
    world.become_witness()
    began_s, error = time.monotonic(), ""
    with entered_world(world):
        try:
            storage = Deadly(VICTIMS[victim] if rank == victim else NEVER, "exchange")
            save(state_of(1, rank=rank), directory / f"save-{victim}", storage=storage)
        except CheckpointError as raised:
            error = str(raised)
    (directory / f"{victim}-{rank}.json").write_text(json.dumps([time.monotonic() - began_s, error]))


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    server = spawn_server("127.0.0.1", 0)
    pids = []
    for victim in VICTIMS:
        for rank in range(NUM_RANKS):
            pid = fork()
            if not pid:
                try:
                    run_rank(server, directory, victim, rank)
                finally:
                    os._exit(0)
            pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    server.close()
    print(json.dumps({path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}))


if __name__ == "__main__":
    main()
