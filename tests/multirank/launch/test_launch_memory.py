"""What workers leave in memory is there until the job ends, and gone then."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

KEEPS_A_FILE = """
    import os, sys, time
    folder = os.environ["DISTTRAIN_MEMORY_DIR"]
    open(f"{folder}/left", "w").write("x")
    print(folder, oct(os.stat(folder).st_mode & 0o777), flush=True)
    time.sleep(float(sys.argv[1]))
"""
SAVES_AND_LOADS = """
    import shutil
    import torch
    import disttrain
    from disttrain.checkpoint import Checkpointer, PeerMemory
    disttrain.init_process_group()
    with Checkpointer("disk", peer_memory=PeerMemory()) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(5)})
    disttrain.barrier()
    shutil.rmtree("disk", ignore_errors=True)
    disttrain.barrier()
    state = {"w": torch.zeros(5, dtype=torch.int64)}
    step = Checkpointer("disk", peer_memory=PeerMemory()).load(state)
    print("loaded", step, state["w"].tolist())
    disttrain.destroy_process_group()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_folder_in_memory_goes_with_the_job(launches: Launches, is_killed: bool) -> None:
    process = launches.start(launches.script(KEEPS_A_FILE), "100" if is_killed else "0")
    folder, mode = launches.ready(process, 1)[0].split()[-2:]
    assert mode == "0o700"
    assert Path(folder).parent == Path("/dev/shm")  # noqa: S108
    if is_killed:
        process.kill()
    launches.end(process)
    assert launches.wait_gone(60.0) == []
    assert not Path(folder).exists()


def test_saves_are_kept_there(forked_launches: Launches) -> None:
    ended = forked_launches.run("--nproc-per-node", "2", forked_launches.script(SAVES_AND_LOADS))
    assert ended.stderr == ""
    assert sorted(ended.lines) == [f"[rank {rank}] loaded 1 [0, 1, 2, 3, 4]" for rank in range(2)]
