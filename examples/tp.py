"""Tensor parallel in one page: a small Llama, cut along two axes, learns the text of this file.

    disttrain-launch --standalone --nproc-per-node 4 examples/tp.py

With four ranks the mesh is 2 x 2: `tp` cuts the layers, as `plan_for` proposes, `dp` the batch and, by `fully_shard`,
what is left of the parameters. What `tp` sends is said before, and counted.
"""

from __future__ import annotations

from pathlib import Path

import torch
from llama.config import LlamaConfig
from llama.model import Llama
from torch import nn

import disttrain
from disttrain import tp
from disttrain.dtensor import CommDebugMode
from disttrain.fsdp2 import fully_shard

SIZES = LlamaConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=160)
ROWS, LENGTH, STEPS = 8, 64, 20


def main() -> None:
    disttrain.init_process_group()
    say = print if disttrain.get_rank() == 0 else lambda _: None
    num_ranks, device = disttrain.get_world_size(), disttrain.current_world().device
    num_tp = 2 if num_ranks % 2 == 0 else 1
    mesh = disttrain.init_device_mesh(device.type, (num_ranks // num_tp, num_tp), mesh_dim_names=("dp", "tp"))
    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)

    def loss_of(step: int) -> torch.Tensor:  # of this rank's rows of the batch, which all along `tp` have
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(step))
        own = starts.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(device)
        rows = text[own[:, None] + torch.arange(LENGTH + 1, device=device)]
        return tp.vocab_parallel_cross_entropy(
            model(rows[:, :-1]), rows[:, 1:], mesh["tp"], vocab_size=SIZES.vocabulary_size
        )

    model = Llama(SIZES)
    model.init(seed=0)
    model.to(device)
    plan = tp.plan_for(model, loss_parallel=True, head_dim=SIZES.head_size)  # a dict: entries may be changed
    num_tokens = ROWS * LENGTH // mesh["dp"].size()
    say(plan.table(num_tp, num_tokens, torch.float32))
    tp.parallelize_module(model, mesh["tp"], plan)

    with CommDebugMode() as comms:
        loss_of(0).backward()
    model.zero_grad()
    gathered, scattered = (comms.get_comm_bytes()[f"{name}_tensor"] for name in ("all_gather_into", "reduce_scatter"))
    sent = (num_tp - 1) * (gathered + scattered / num_tp)  # a gather is given a part, the other the whole
    planned = plan.wire_bytes(num_tp, num_tokens, torch.float32)
    of_loss = (num_tp - 1) * num_tokens * 2 * 4  # two numbers of four bytes per token
    say(f"\ncounted: {sent:,.0f} bytes; the plan says {planned:,.0f}, and the loss sends {of_loss:,}")
    say(f"{comms}\n")  # the all-reduces are of the norms' gradients
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        loss = loss_of(step)
        loss.backward()  # gradients are averaged along `dp`
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        disttrain.all_reduce(mean := loss.detach(), disttrain.ReduceOp.AVG, mesh["dp"].get_group())
        say(f"step {step:2}: loss {mean.item():.4f}, norm of the gradients {norm.item():.3f}")
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
