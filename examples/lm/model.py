"""A byte-level Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Sources: Touvron et al., "LLaMA" (arXiv 2302.13971); Su et al., "RoFormer" (2104.09864); Ainslie et al., "GQA"
(2305.13245); Shazeer, "GLU Variants Improve Transformer" (2002.05202).

Shapes: B sequences, S bytes, D elements of a byte's vector, H heads of E = D / H elements each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY_SIZE = 256
"""One token per byte: there is no tokenizer to train or to download, and any file is text."""
ROTARY_BASE = 10_000.0
EMBEDDING_STD = 0.5


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes; `hidden_size` is that of the feed-forward layers."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int


PRESETS = {
    "tiny": LlamaConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=96),
    "small": LlamaConfig(dim=128, num_layers=4, num_heads=4, num_kv_heads=1, hidden_size=352),
    "base": LlamaConfig(dim=768, num_layers=12, num_heads=12, num_kv_heads=4, hidden_size=2048),
}


class Attention(nn.Module):
    """Causal attention in which each head of keys and values serves several heads of queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.dim // config.num_heads
        kv_size = config.num_kv_heads * self.head_size
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_size, bias=False)
        self.value = nn.Linear(config.dim, kv_size, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x (B, S, D), rotation (2, S, E / 2) -> (B, S, D)."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (B, heads, S, E)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, rotation), rotate(key, rotation)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: a linear layer, gated by another."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_size, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_size, bias=False)
        self.down = nn.Linear(config.hidden_size, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """What is repeated, and what `fully_shard` gathers at once."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The network. Made on the meta device it costs no memory; `init` fills it once it has some."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY_SIZE, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, VOCABULARY_SIZE, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) int64 -> logits of each one's next byte (B, S, 256)."""
        x = self.embedding(tokens)
        rotation = rotation_at(torch.arange(tokens.shape[1], device=tokens.device), self.config)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))

    def init(self) -> None:
        """Draw all parameters from torch's default generator; seed it alike on all ranks."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:  # a norm's
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self._std(name, input_size=parameter.shape[1]))

    def _std(self, name: str, input_size: int) -> float:
        if name.startswith("embedding"):
            return EMBEDDING_STD
        if name.endswith(("output.weight", "down.weight")):
            return (input_size * 2 * self.config.num_layers) ** -0.5  # layers add up along the residual path
        return input_size**-0.5


def rotation_at(positions: Tensor, config: LlamaConfig) -> Tensor:
    """Cosines and sines of the positions' angles: (S,) -> (2, S, E / 2) float32."""
    E = config.dim // config.num_heads
    frequencies = ROTARY_BASE ** -(torch.arange(0, E, 2, device=positions.device) / E)
    angles = torch.outer(positions, frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of elements (i, i + E / 2) by its position's angle, so that products depend on distances only."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)
