"""Tensor parallel in half a page: an MLP cut by columns, then by rows, gives what a whole one gives.

    disttrain-launch --standalone --nproc-per-node 2 examples/tp_mlp.py

Each rank multiplies by its part of the hidden layer; nothing is sent in between, and one sum ends it. `tp.py` cuts a
whole Llama along two axes.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import disttrain
from disttrain import tp
from disttrain.dtensor import CommDebugMode, DTensor

WIDTH, HIDDEN, ROWS = 32, 128, 16


def say(text: object) -> None:
    if disttrain.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    disttrain.init_process_group()
    device = disttrain.current_world().device
    mesh = disttrain.init_device_mesh(device.type, (disttrain.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).to(device)
    x = torch.randn(ROWS, WIDTH, device=device)
    cut = tp.parallelize_module(copy.deepcopy(whole), mesh, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    assert isinstance(cut[0].weight, DTensor)
    say(
        f"the first weight, {tuple(whole[0].weight.shape)}: each rank has {tuple(cut[0].weight.to_local().shape)} of it"
    )

    with CommDebugMode() as comms:
        y = cut(x)
    y.square().mean().backward()
    expected = whole(x)
    expected.square().mean().backward()
    say(f"forward sends:\n{comms}")
    say(f"outputs differ by {(y - expected).abs().max().item():.0e} at most")
    gradient = cut[0].weight.grad
    assert isinstance(gradient, DTensor)
    difference = (gradient.full_tensor() - whole[0].weight.grad).abs().max().item()
    say(f"gradients of the first weight differ by {difference:.0e} at most")
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
