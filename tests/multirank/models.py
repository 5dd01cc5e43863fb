"""Small models that tests on ranks train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual MLP with a norm and a bias; its sizes divide nothing."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    """Embedding, blocks, and a head that shares the embedding's weight."""

    def __init__(self, vocab: int = 11, dim: int = 7, hidden: int = 13, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(num_blocks))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def init(self, seed: int) -> TinyModel:
        """The same values on every rank."""
        torch.manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        return self


def batch(step: int, rows: int = 12, length: int = 5, vocab: int = 11) -> torch.Tensor:
    """The global batch of a step, (rows, length)."""
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(step))


def own_rows(tokens: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's equal share of a global batch."""
    return tokens.chunk(num_ranks)[rank]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of predicting each token from itself."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
