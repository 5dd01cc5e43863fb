"""Models that the planner counts and fully_shard divides; nothing of them is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from disttrain.plan import LlamaSizes
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore


class Attention(nn.Module):
    """Its linear layers."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.query = nn.Linear(sizes.dim, sizes.query_size, bias=False)
        self.key = nn.Linear(sizes.dim, sizes.key_size, bias=False)
        self.value = nn.Linear(sizes.dim, sizes.key_size, bias=False)
        self.out = nn.Linear(sizes.query_size, sizes.dim, bias=False)


class GatedMlp(nn.Module):
    """Its linear layers."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, width, bias=False), nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)


class Model(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, sizes: LlamaSizes, make_block: Callable[[LlamaSizes], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.blocks = nn.ModuleList(make_block(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def world_of_absent_ranks(num_ranks: int) -> Iterator[World]:
    """Rank 0 of a world whose other ranks are not there; for a fixture."""
    made = World(HashStore(), 0, num_ranks, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    with entered_world(made):
        yield made
