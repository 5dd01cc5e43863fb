"""A pipeline in one page: a small Llama in stages, one or two on each rank, learns the text of this file.

    disttrain-launch --standalone --nproc-per-node 2 examples/pipeline.py --schedule 1F1B ZBV

What a schedule will do is drawn before anything runs. Losses are the same whatever the schedule and on any number of
ranks: `python -m disttrain.pipelining compare` says what differs.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.pipelining import clip_grad_norm_, draw_text, get_schedule_class, make_schedule, simulate, split_blocks

VOCABULARY, WIDTH, HEAD, HIDDEN, LAYERS = 256, 64, 16, 160, 8
ROWS, LENGTH, MICROBATCHES, STEPS = 16, 64, 8, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def rotated(x: torch.Tensor) -> torch.Tensor:  # pairs of numbers of each head, by their place in the sequence
    angles = (torch.arange(x.shape[-2])[:, None] * 1e4 ** -torch.linspace(0, 1, HEAD // 2)).to(x.device)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def llama() -> nn.Sequential:
    torch.manual_seed(0)  # all ranks make the same model, and keep their stages of it
    blocks, head = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.Linear(WIDTH, VOCABULARY, bias=False)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    head.weight = embedding.weight  # two stages have it, and add up their gradients
    return nn.Sequential(OrderedDict(embedding=embedding, blocks=blocks, norm=nn.RMSNorm(WIDTH), head=head))


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # Rows of an embedding are about as long as this: as a head it makes logits that are too large otherwise.
    return F.cross_entropy(logits.flatten(0, 1) / WIDTH**0.5, target.flatten())


def train(name: str, text: torch.Tensor) -> None:
    rank, num_ranks, device = disttrain.get_rank(), disttrain.get_world_size(), text.device
    plan = make_schedule(name, num_ranks, MICROBATCHES)  # torch-free: what each rank does, in its order
    if rank == 0:
        print(draw_text(simulate(plan), width=120), flush=True)
    model = split_blocks(llama(), plan.num_stages)
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
