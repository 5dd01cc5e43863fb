"""Checkpoints in one page: saved on one mesh while training goes on, loaded on another; looked at without either.

disttrain-launch --standalone --nproc-per-node 4 examples/checkpoint.py --out runs/checkpoint
python -m disttrain.checkpoint ls runs/checkpoint/step-00000003
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import disttrain
from disttrain import tp
from disttrain.checkpoint import Checkpointer, load_full, set_training_state, training_state
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import fully_shard

WIDTH, STEPS = 16, 6


def say(text: object) -> None:
    if disttrain.get_rank() == 0:
        print(text, flush=True)


def make(mesh: disttrain.DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network whose layers are cut along `tp`, and whose parameters along `dp`."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 1)).to(mesh.world.device)
    if mesh["tp"].size() > 1:
        tp.parallelize_module(model, mesh["tp"], {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: disttrain.DeviceMesh, step: int) -> float:
    """One step; each rank along `dp` takes rows of its own."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(mesh.world.device)
    own = x.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    loss = (model(own) - own.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    disttrain.all_reduce(mean := loss.detach(), disttrain.ReduceOp.AVG)
    return mean.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/checkpoint"), help="folder of the saves")
    out = parser.parse_args().out
    if any(out.glob("step-*")):
        sys.exit(f"checkpoint: --out {out} has saves in it. Remove them, or name another folder.")
    disttrain.init_process_group()
    size, device = disttrain.get_world_size(), disttrain.current_world().device
    num_tp = 2 if size % 2 == 0 else 1
    sharded = disttrain.init_device_mesh(device.type, (size, 1), mesh_dim_names=("dp", "tp"))
    cut = disttrain.init_device_mesh(device.type, (size // num_tp, num_tp), mesh_dim_names=("dp", "tp"))

    model, optimizer = make(sharded, seed=0)
    losses = []
    with Checkpointer(out, keep=None) as checkpointer:
        for step in range(STEPS):
            if step == STEPS // 2:
                # The values are safe at once; a process beside this one writes them.
                pending = checkpointer.async_save(step, training_state(model, optimizer), optimizer)
            losses.append(train(model, optimizer, sharded, step))
        say(f"{pending.result()} was written while training went on")

    again, its_optimizer = make(cut, seed=1)
    state = training_state(again, its_optimizer)
    first = Checkpointer(out).load(state, step=STEPS // 2)
    set_training_state(again, its_optimizer, state)
    for step in range(first, STEPS):
        loss = train(again, its_optimizer, cut, step)
        say(f"step {step}: loss {losses[step]:.6f} on {sharded.layout}, {loss:.6f} on {cut.layout}")
    for name in ("0.weight", "2.weight"):
        weight = again.get_parameter(name)
        assert isinstance(weight, DTensor)
        say(f"{name} lies as {list(weight.placements)}, {tuple(weight.to_local().shape)} of {tuple(weight.shape)} here")
    if disttrain.get_rank() == 0:
        tensors = load_full(out / f"step-{first:08d}")["model"]  # plain tensors, in one process
        print(f"in one process: { {name: tuple(tensor.shape) for name, tensor in tensors.items()} }", flush=True)
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
