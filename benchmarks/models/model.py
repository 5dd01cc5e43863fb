"""The decoder that both libraries train as it is: nothing in it knows of either.

Shapes: B sequences, S tokens, D elements of a token's vector, H heads of E = D / H elements each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 500_000.0


@dataclass(frozen=True)
class Sizes:
    """A Llama of 8 billion parameters has these, and 32 layers."""

    dim: int = 4096
    layers: int = 8
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256
    seq: int = 8192
    experts: int = 0
    """Of size `ffn` each, `top_k` of them for a token; none: one for all tokens."""
    top_k: int = 0

    def flops(self, num_tokens: int) -> float:
        """Of a training step over so many tokens: six for each weight, and causal attention's."""
        kv_dim = self.dim // self.heads * self.kv_heads
        per_layer = 2 * self.dim * (self.dim + kv_dim) + 3 * self.dim * self.ffn * max(1, self.top_k)
        weights = self.layers * per_layer + self.dim * self.vocab
        return num_tokens * 6.0 * (weights + self.layers * self.dim * self.seq)


class Attention(nn.Module):
    """Causal, with rotary positions; each head of keys and values serves several of queries."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_size = sizes.dim // sizes.heads
        kv_dim = sizes.kv_heads * self.head_size
        self.query = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.key = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.value = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.output = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, S, D), cos and sin (S, E / 2) -> (B, S, D)."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (B, heads, S, E)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.dim, sizes.ffn, bias=False)
        self.up = nn.Linear(sizes.dim, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """What is repeated."""

    def __init__(self, sizes: Sizes, feed_forward: Callable[[Sizes], nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.attention = Attention(sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.feed_forward = feed_forward(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, sizes: Sizes, feed_forward: Callable[[Sizes], nn.Module] = FeedForward) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes, feed_forward) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(sizes.seq, sizes.dim // sizes.heads // 2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) int64 -> logits (B, S, classes)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Fill what lies on this rank, norms with ones, the rest at random; of one seed both libraries get the same."""
        elements = self.sizes.dim // self.sizes.heads
        frequencies = ROTARY_BASE ** -(torch.arange(0, elements, 2) / elements)
        angles = torch.outer(torch.arange(self.sizes.seq).float(), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())
        torch.manual_seed(seed)
        for parameter in self.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.normal_(std=0.02) if parameter.ndim > 1 else local.fill_(1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of elements (i, i + E / 2) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)
