"""A Llama without rotation, in stages: embedding on the first, norm and head on the last, layers spread evenly.

With experts its blocks have several small gated MLPs in place of one, on all ranks of a group together. Which tokens
go where is fixed and even, so that all there is to see is what their way there and back costs: each token to
`experts_per_token` experts, each expert on a rank of its own share.
"""

from __future__ import annotations

from collections.abc import Callable
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
    experts_per_token: int = 0

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


Exchange = Callable[[torch.Tensor], torch.Tensor]
"""Sends equal parts of dim 0 to the ranks of a group, with a gradient."""


class Mlp(nn.Module):
    """Gated."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """This rank's of a group's experts, as many as a token goes to; together they compute as much as one `Mlp`."""

    def __init__(self, sizes: Sizes, exchange: Exchange) -> None:
        super().__init__()
        self.num = sizes.experts_per_token
        self.experts = nn.ModuleList(Mlp(sizes.dim, sizes.ffn // self.num) for _ in range(self.num))
        self.exchange = exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.exchange(x.flatten(0, -2).repeat(self.num, 1))
        parts = [expert(part) for expert, part in zip(self.experts, tokens.chunk(self.num), strict=True)]
        return self.exchange(torch.cat(parts)).view(self.num, *x.shape).sum(0)


class Block(nn.Module):
    """Grouped-query attention, and a gated MLP or experts."""

    def __init__(self, sizes: Sizes, exchange: Exchange | None) -> None:
        super().__init__()
        dim, self.head_dim = sizes.dim, sizes.dim // sizes.heads
        self.norm = nn.RMSNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, sizes.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, sizes.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim)
        self.ffn = Mlp(dim, sizes.ffn) if exchange is None else Experts(sizes, exchange)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            linear(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class Stage(nn.Module):
    """Takes tokens if it is the first, else activations; gives logits if it is the last, or what they are made of."""

    gives_hidden = False

    def __init__(self, sizes: Sizes, stage: int, num_stages: int, exchange: Exchange | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.dim) if stage == 0 else None
        self.blocks = nn.ModuleList(Block(sizes, exchange) for _ in range(sizes.layers_of(stage, num_stages)))
        self.norm, self.head = None, None
        if stage == num_stages - 1:
            self.norm, self.head = nn.RMSNorm(sizes.dim), nn.Linear(sizes.dim, sizes.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.norm(x)
            x = x if self.gives_hidden else self.head(x)
        return x

    def compile_blocks(self) -> None:
        """By wrappers rather than `block.compile()`: those torch's schedules know, and refuse before anyone waits."""
        for number, block in enumerate(self.blocks):
            self.blocks[number] = torch.compile(block, fullgraph=True)


def make_stage(
    sizes: Sizes,
    stage: int,
    num_stages: int,
    device: torch.device,
    dtype: torch.dtype,
    exchange: Exchange | None = None,
) -> Stage:
    """The same weights each time. With an `exchange` its blocks have experts."""
    with torch.device("meta"):
        made = Stage(sizes, stage, num_stages, exchange).to(dtype)
    made.to_empty(device=device)
    torch.manual_seed(stage)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return made


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Every rank's `loss_fn`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
