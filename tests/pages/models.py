"""A small model of decoder blocks, which the code of several pages is run with."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEAD, HIDDEN, LAYERS = 256, 64, 16, 160, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in (self.query, self.key, self.value))
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def small_llama() -> nn.Sequential:
    torch.manual_seed(0)
    parts = {
        "embedding": nn.Embedding(VOCABULARY, WIDTH),
        "blocks": nn.Sequential(*(Block() for _ in range(LAYERS))),
        "norm": nn.RMSNorm(WIDTH),
        "head": nn.Linear(WIDTH, VOCABULARY, bias=False),
    }
    return nn.Sequential(OrderedDict(parts))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
