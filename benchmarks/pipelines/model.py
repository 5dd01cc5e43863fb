"""A Llama without rotation, in stages: embedding on the first, norm and head on the last, layers spread evenly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

FLOPS = (
    "tokens * (6 * elements of all matrices but the embedding + 6 * layers * seq * dim): causal half, no recomputation"
)


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of a step: so many microbatches of so many sequences."""

    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    layers: int = 16
    vocab: int = 32000
    seq: int = 4096
    microbatches: int = 16
    microbatch_size: int = 1

    @property
    def num_sequences(self) -> int:
        return self.microbatches * self.microbatch_size

    @property
    def flops(self) -> float:
        """Of one step on all ranks, by `FLOPS`."""
        attention = 2 * self.dim * self.dim * (1 + self.kv_heads / self.heads)
        matrices = self.layers * (attention + 3 * self.dim * self.ffn) + self.dim * self.vocab
        return self.num_sequences * self.seq * (6 * matrices + 6 * self.layers * self.seq * self.dim)

    def layers_of(self, stage: int, num_stages: int) -> int:
        """The first stages have one more where they don't divide."""
        return self.layers // num_stages + (stage < self.layers % num_stages)


class Block(nn.Module):
    """Grouped-query attention and a gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, self.head_dim = sizes.dim, sizes.dim // sizes.heads
        self.norm = nn.RMSNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, sizes.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, sizes.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, sizes.ffn, bias=False)
        self.up = nn.Linear(dim, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            linear(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Stage(nn.Module):
    """Takes tokens if it is the first, else activations; gives logits if it is the last."""

    def __init__(self, sizes: Sizes, stage: int, num_stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.dim) if stage == 0 else None
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers_of(stage, num_stages)))
        self.norm, self.head = None, None
        if stage == num_stages - 1:
            self.norm, self.head = nn.RMSNorm(sizes.dim), nn.Linear(sizes.dim, sizes.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def compile_blocks(self) -> None:
        """By wrappers rather than `block.compile()`: those torch's schedules know, and refuse before anyone waits."""
        for number, block in enumerate(self.blocks):
            self.blocks[number] = torch.compile(block, fullgraph=True)


def make_stage(sizes: Sizes, stage: int, num_stages: int, device: torch.device, dtype: torch.dtype) -> Stage:
    """The same weights each time."""
    with torch.device("meta"):
        made = Stage(sizes, stage, num_stages).to(dtype)
    made.to_empty(device=device)
    torch.manual_seed(stage)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return made


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Every rank's `loss_fn`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
