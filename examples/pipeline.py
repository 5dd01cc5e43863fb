"""A pipeline in one page: a small Llama in stages, one or two on each rank, learns the text of this file.

    disttrain-launch --standalone --nproc-per-node 2 examples/pipeline.py --schedule 1F1B ZBV

What a schedule will do is drawn before anything runs. Losses are the same whatever the schedule and on any number of
ranks: `python -m disttrain.pipelining compare` says what differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from llama.config import LlamaConfig
from llama.model import Llama

import disttrain
from disttrain.pipelining import clip_grad_norm_, draw_text, get_schedule_class, make_schedule, simulate, split_blocks

# Embedding and head are one matrix: two stages have it, and add up their gradients.
SIZES = LlamaConfig(dim=64, num_layers=8, num_heads=4, num_kv_heads=4, hidden_size=160, is_tied=True)
ROWS, LENGTH, MICROBATCHES, STEPS = 16, 64, 8, 8


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(name: str, text: torch.Tensor) -> None:
    rank, num_ranks, device = disttrain.get_rank(), disttrain.get_world_size(), text.device
    plan = make_schedule(name, num_ranks, MICROBATCHES)  # torch-free: what each rank does, in its order
    if rank == 0:
        print(draw_text(simulate(plan), width=120), flush=True)
    whole = Llama(SIZES)
    whole.init(seed=0)  # all ranks make the same model, and keep their stages of it
    model = split_blocks(whole, plan.num_stages)
    stages = [model.build_stage(stage, device) for stage in plan.placement.stages[rank]]
    schedule = get_schedule_class(name)(stages, MICROBATCHES, loss_fn)
    optimizer = torch.optim.AdamW(schedule.parameters(), lr=3e-3)
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(step)).to(device)
        rows = text[starts + torch.arange(LENGTH + 1, device=device)]
        losses: list[torch.Tensor] = []
        # The first stage takes the inputs, the last one targets; a rank that has neither passes them over.
        schedule.step(rows[:, :-1], target=rows[:, 1:], losses=losses, return_outputs=False)
        norm = clip_grad_norm_(schedule, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if losses:  # on the rank of the last stage, one per microbatch
            loss = torch.stack(losses).mean()
            print(f"{plan.name}, step {step}: loss {loss:.6f}, norm of the gradients {norm:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", nargs="+", default=["1F1B"], help="names: one after the other, from the start")
    options = parser.parse_args()
    disttrain.init_process_group()
    text = torch.tensor(list(Path(__file__).read_bytes()), device=disttrain.current_world().device)
    for name in options.schedule:
        train(name, text)
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
