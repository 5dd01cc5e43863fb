"""FSDP2 in one page: a small transformer whose parameters are cut over the ranks learns to count.

    disttrain-launch --standalone --nproc-per-node 2 examples/fsdp2.py --mesh dp=2
    disttrain-launch --standalone --nproc-per-node 4 examples/fsdp2.py --mesh replicate=2,shard=2 --out runs/hsdp

Along the last axis of the mesh parameters are cut, along one before it copied. It computes in bfloat16, and adds up the
gradients of two batches before any are sent. What this costs is printed first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.checkpoint import Checkpointer, training_state
from disttrain.fsdp2 import MixedPrecisionPolicy, estimate, fully_shard

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 64, 4, 3
STEPS, MICROBATCHES, ROWS, LENGTH = 9, 2, 8, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).movedim(1, -2)
        attended = F.scaled_dot_product_attention(*heads.unbind(1), is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norms[1](x))


def batch(number: int) -> torch.Tensor:
    """This rank's rows, (ROWS, LENGTH + 1), each of which counts on from somewhere."""
    generator = torch.Generator().manual_seed(number * disttrain.get_world_size() + disttrain.get_rank())
    start = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
    return (start + torch.arange(LENGTH + 1)) % VOCABULARY


def say(text: object) -> None:
    if disttrain.get_rank() == 0:
        print(text)


def axes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mesh", type=axes, default="dp=2", help="axes and their sizes, such as replicate=2,shard=2")
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"), help="folder of the checkpoint")
    flags = parser.parse_args()
    if flags.out.exists():
        sys.exit(f"fsdp2: --out {flags.out} is there already. Remove it, or name another folder.")
    disttrain.init_process_group()
    device = disttrain.current_world().device
    mesh = disttrain.init_device_mesh(device.type, tuple(flags.mesh.values()), mesh_dim_names=tuple(flags.mesh))

    with torch.device("meta"):  # no rank ever holds more than its part, and the blocks at work
        blocks = [Block() for _ in range(LAYERS)]
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    say(estimate(model, num_microbatches=MICROBATCHES, reduces_each=False))
    model.to_empty(device=device)
    torch.manual_seed(0)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()  # each rank draws its part of what one process would draw

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for micro in range(MICROBATCHES):
            model.set_requires_gradient_sync(micro == MICROBATCHES - 1)
            tokens = batch(step * MICROBATCHES + micro).to(device)
            logits = model(tokens[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        disttrain.all_reduce(total, disttrain.ReduceOp.AVG)
        if step % 2 == 0:
            say(f"step {step}: loss {total.item():.4f}, norm of the gradients {norm.item():.3f}")
    Checkpointer(flags.out).save(STEPS, training_state(model, optimizer))
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
