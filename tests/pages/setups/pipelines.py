"""What the code of docs/pipelines.md takes for granted."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import disttrain
from disttrain import pipelining, tp
from disttrain.fsdp2 import fully_shard
from tests.pages.models import HEAD, VOCABULARY, WIDTH, loss_fn, small_llama

NUM_RANKS = 2
ROWS, LENGTH = 8, 16
CPU = torch.device("cpu")


class Begin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        return x if positions is None else x + self.places(positions)


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.head(x)


def names(section: str) -> dict[str, Any]:
    torch.manual_seed(0)
    rank = disttrain.get_rank()
    tokens, targets = torch.randint(VOCABULARY, (2, ROWS, LENGTH))
    stage = pipelining.PipelineStage([Begin, End][rank](), rank, NUM_RANKS, CPU)
    given = {
        "F": F,
        "batches": [(tokens, targets)],
        "bytes_per_s": 1e9,
        "device": CPU,
        "forward_s": 1.0,
        "fully_shard": fully_shard,
        "head_dim": HEAD,
        "input_s": 1.0,
        "latency_s": 1e-5,
        "long": torch.randint(VOCABULARY, (2, LENGTH)),
        "loss_fn": loss_fn,
        "message_bytes": 1e6,
        "model": small_llama(),
        "module": End(),
        "num_dp": 1,
        "num_microbatches": ROWS,
        "num_pp": NUM_RANKS,
        "num_ranks": NUM_RANKS,
        "num_stages": 3,
        "num_tp": 1,
        "plan": pipelining.make_schedule("1F1B", NUM_RANKS, ROWS),
        "positions": torch.arange(LENGTH).expand(ROWS, -1),
        "rank": rank,
        "schedule": pipelining.Schedule1F1B(stage, 4, loss_fn),
        "short": torch.randint(VOCABULARY, (2, LENGTH // 2)),
        "stage": stage,
        "stage_index": 2,
        "stages": [],
        "targets": targets,
        "tokens": tokens,
        "torch": torch,
        "tp": tp,
        "weight_s": 1.0,
        **{name: getattr(pipelining, name) for name in pipelining.__all__},
    }
    if section == "Stages":
        parts = OrderedDict(encoder=nn.Linear(4, 4), decoder=nn.Linear(4, 4))
        given |= {"model": nn.Sequential(parts), "example": torch.randn(2, 4)}
    return given
