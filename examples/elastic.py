"""A job that loses a worker on purpose, and goes on: the launcher starts all again, and training where it was saved.

    disttrain-launch --standalone --nproc-per-node 2 --max-restarts 1 examples/elastic.py --out runs/elastic

With `--nnodes 2:4` nodes may come and go as well: each time the ranks are counted anew, and the save fits any number.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import disttrain
from disttrain import settings
from disttrain.checkpoint import Checkpointer, set_training_state, training_state
from disttrain.fsdp2 import fully_shard

STEPS, SAVE_EVERY, FATAL_STEP = 8, 2, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/elastic"), help="folder of the saves")
    out = parser.parse_args().out
    disttrain.init_process_group()
    rank, size, attempt = disttrain.get_rank(), disttrain.get_world_size(), settings.ROUND.read() or 0
    device = disttrain.current_world().device

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(16, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    first = 0
    with Checkpointer(out, every=SAVE_EVERY) as checkpointer:
        if checkpointer.latest() is not None:
            state = training_state(model, optimizer)
            first = checkpointer.load(state)
            set_training_state(model, optimizer, state)
        if rank == 0:
            print(f"attempt {attempt}: {size} ranks begin at step {first}", flush=True)
        if first == STEPS:
            sys.exit(f"elastic: {out} has a run that came to its end. Remove it, or name another folder.")
        for step in range(first, STEPS):
            if attempt == 0 and step == FATAL_STEP and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)
            own = x.chunk(size)[rank]
            loss = (model(own) - own.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            disttrain.all_reduce(mean := loss.detach(), disttrain.ReduceOp.AVG)
            disttrain.report(step=step, loss=mean.item())
            if rank == 0:
                print(f"step {step}: loss {mean.item():.6f}", flush=True)
            if checkpointer.is_due(step + 1):
                checkpointer.save(step + 1, training_state(model, optimizer))
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
