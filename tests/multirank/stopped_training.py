"""A training that is told to go: it saves, leaves, and goes on when it is started again. One line for each step.

disttrain-launch --nproc-per-node 2 stopped_training.py FOLDER NUM_STEPS [HOW GATE]

HOW is "save" or "async_save", whose data wait until the gate of a GatedStorage is open.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import disttrain
from disttrain.checkpoint import Checkpointer, set_training_state, training_state
from disttrain.fsdp2 import fully_shard
from tests.multirank.gated_storage import GatedStorage


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    how, gate = sys.argv[3:] or ("async_save", None)
    storage = None if gate is None else GatedStorage(gate)
    disttrain.init_process_group()
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    is_stopped = disttrain.stop_requested()
    (folder / f"asked-{rank}").touch()
    if rank == 0:
        print("asked", flush=True)
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(12, 3).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with (
        Checkpointer(folder / "saves", every=7, storage=storage) as checkpointer,
        open(folder / "losses", "a") as losses,
    ):
        step = 0
        if checkpointer.latest() is not None:
            state = training_state(model, optimizer)
            step = checkpointer.load(state)
            set_training_state(model, optimizer, state)
        while step < num_steps and not is_stopped:
            x = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            own = x[rank * 12 // size : (rank + 1) * 12 // size]
            loss = (model(own) - own[:, :3]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            disttrain.all_reduce(mean, disttrain.ReduceOp.AVG)
            if rank == 0:
                losses.write(f"{step} {mean.item():.12f}\n")
                losses.flush()
            step += 1
            time.sleep(0.002 * (rank + 1))
            is_stopped = disttrain.stop_requested()
            if is_stopped or checkpointer.is_due(step):
                if how == "save":
                    checkpointer.save(step, training_state(model, optimizer))
                else:
                    checkpointer.async_save(step, training_state(model, optimizer), optimizer)
    disttrain.destroy_process_group()
    if step < num_steps:
        sys.exit(disttrain.REQUEUE_EXIT_CODE)


if __name__ == "__main__":
    main()
