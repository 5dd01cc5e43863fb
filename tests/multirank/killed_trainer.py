"""A trainer that can be killed at any step: what its test starts, by the launcher. Arguments: a folder, and `tokens` or
`streams`.

Each rank writes the samples that it has had, and the loss of all, step by step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import disttrain
from disttrain.checkpoint import Checkpointer, set_training_state, training_state
from disttrain.data import Loader, Prefetcher, StreamLoader
from disttrain.fsdp2 import fully_shard

NUM_SAMPLES = 72
BATCH_SIZE = 12
NUM_STEPS = 18
NUM_STREAMS = 6
SAVE_EVERY = 3


class Counting:
    """A stream with a state of its own."""

    def __init__(self, first: int) -> None:
        self.first, self.at = first, 0

    def __iter__(self) -> Iterator[int]:
        while self.first + self.at * NUM_STREAMS < NUM_SAMPLES:
            self.at += 1
            yield self.first + (self.at - 1) * NUM_STREAMS
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def source_of(kind: str) -> Any:
    if kind == "streams":
        return StreamLoader([Counting(number) for number in range(NUM_STREAMS)], BATCH_SIZE)
    return Loader(range(NUM_SAMPLES), BATCH_SIZE, seed=4, endless=True)


def main() -> None:
    folder = Path(sys.argv[1])
    disttrain.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    features = torch.randn(NUM_SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    name = f"world-{disttrain.get_world_size()}-rank-{disttrain.get_rank()}-pid-{os.getpid()}.jsonl"
    with (
        Checkpointer(folder / "saves") as saves,
        Prefetcher(source_of(sys.argv[2]), "cpu", num_ahead=3) as batches,
        (folder / name).open("a", encoding="utf-8") as log,
    ):
        first_step = 0
        if saves.latest() is not None:
            state = {**training_state(model, optimizer), "data": batches}
            first_step = saves.load(state)
            set_training_state(model, optimizer, state)
        for step in range(first_step, NUM_STEPS):
            samples = next(batches)
            loss = (model(features[samples]) - features[samples].sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            disttrain.all_reduce(loss.detach(), disttrain.ReduceOp.AVG)
            log.write(json.dumps({"step": step, "samples": samples.tolist(), "loss": loss.item()}) + "\n")
            log.flush()
            time.sleep(0.01)  # for whoever wants to kill it
            if (step + 1) % SAVE_EVERY == 0:
                saves.save(step + 1, {**training_state(model, optimizer), "data": batches})
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
