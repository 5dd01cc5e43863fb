"""DTensor in one page: a small network cut over a mesh trains as it does in one process.

    disttrain-launch --standalone --nproc-per-node 4 examples/dtensor.py

With four ranks the mesh is 2 x 2: along `dp` the batch is cut, along `tp` the layers. Nothing below says what is sent;
`CommDebugMode` counts it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import disttrain
from disttrain.dtensor import (
    CommDebugMode,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    visualize_sharding,
)

BATCH, WIDTH, HIDDEN, STEPS = 32, 16, 64, 20


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1))


def cut(name: str, layer: nn.Module, mesh: disttrain.DeviceMesh) -> None:
    """The first layer by its results and the second by its arguments: between them nothing is sent."""
    dims = {"0": {"weight": 0, "bias": 0}, "2": {"weight": 1}}.get(name, {})
    for key, dim in dims.items():
        whole = layer.get_parameter(key).detach()
        layer.register_parameter(key, nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(dim)])))


def say(text: object) -> None:
    # What is printed must be known before: to ask a DTensor for its value takes all ranks.
    if disttrain.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    disttrain.init_process_group()
    num_ranks = disttrain.get_world_size()
    tp = 2 if num_ranks % 2 == 0 else 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = disttrain.init_device_mesh(device, (num_ranks // tp, tp), mesh_dim_names=("dp", "tp"))

    alone, together = network(), network()
    distribute_module(together, mesh, cut)  # what `cut` leaves is replicated
    x = torch.randn(BATCH, WIDTH)
    y = x.sin().sum(1, keepdim=True)
    rows, targets = (distribute_tensor(each, mesh, [Shard(0), Replicate()]) for each in (x, y))

    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (alone, together)]
    comms = CommDebugMode()
    for step in range(STEPS):
        losses = []
        for model, optimizer, batch, wanted in zip((alone, together), optimizers, (x, rows), (y, targets), strict=True):
            optimizer.zero_grad()
            with comms:
                loss = F.mse_loss(model(batch), wanted)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            losses.append(loss.item())  # the value, on every rank
        if step % 5 == 0 or step == STEPS - 1:
            say(f"step {step:2}: loss {losses[0]:.6f} in one process, {losses[1]:.6f} on {num_ranks} ranks")
    say(f"\nThe last step's collectives on this rank:\n{comms}\n")

    weight = together[0].weight
    assert isinstance(weight, DTensor)
    if disttrain.get_rank() == 0:
        visualize_sharding(weight, header=f"The first weight lies as {list(weight.placements)}; ranks hold")
    columns = weight.detach().redistribute(placements=[Shard(1), Shard(0)])
    difference = (columns.full_tensor() - alone[0].weight).abs().max().item()
    say(f"\nRedistributed as {list(columns.placements)}, it is within {difference:.0e} of the one process's.")
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
