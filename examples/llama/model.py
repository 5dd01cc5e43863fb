"""A Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Sources: Touvron et al., "LLaMA" (arXiv 2302.13971); Su et al., "RoFormer" (2104.09864); Ainslie et al., "GQA"
(2305.13245); Shazeer, "GLU Variants Improve Transformer" (2002.05202).

Shapes: B sequences, S tokens, L positions at most, D elements of a token's vector, H heads of E = D / H elements each.
On ranks that cut layers by heads and activations along the sequence, each sees its heads, and between layers its part
of S. So nothing below asks for a number of heads, nor for S outside attention. Where positions are cut throughout (cp),
S are this rank's.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disttrain import DeviceMesh
from disttrain.context_parallel import own_positions
from disttrain.experts import Balance, Experts, MixtureOfExperts, Router, RouterRule
from llama.config import LlamaConfig

EMBEDDING_STD = 0.5
BALANCE = Balance(aux_loss_coeff=0.01, z_loss_coeff=0.001, over="batch")
"""Of the whole batch, so that it matters not which rank has which rows of it."""


class Attention(nn.Module):
    """Causal attention in which each head of keys and values serves several heads of queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        kv_size = config.num_kv_heads * self.head_size
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_size, bias=False)
        self.value = nn.Linear(config.dim, kv_size, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x (B, S, D), rotation (2, L, E / 2) of the first positions that are here -> (B, S, D)."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (B, heads, S, E)
            for project in (self.query, self.key, self.value)
        )
        rotation = rotation[:, : query.shape[-2]]
        query, key = rotate(query, rotation), rotate(key, rotation)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: a linear layer, gated by another."""

    def __init__(self, config: LlamaConfig, hidden_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, hidden_size, bias=False)
        self.up = nn.Linear(config.dim, hidden_size, bias=False)
        self.down = nn.Linear(hidden_size, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Axes(NamedTuple):
    """Ranks of a mesh: those that see different tokens, and those that have different experts."""

    tokens: DeviceMesh | None = None
    experts: DeviceMesh | None = None


def make_experts(config: LlamaConfig, axes: Axes) -> MixtureOfExperts:
    """Many feed-forward layers, of which a router chooses some for each token (Fedus et al., 2101.03961)."""
    rule = RouterRule(config.num_experts, config.top_k)
    router = Router(config.dim, rule, BALANCE, batch_axis=axes.tokens, expert_axis=axes.experts)
    experts = Experts(config.num_experts, config.dim, config.expert_size)
    return MixtureOfExperts(router, experts, FeedForward(config, config.shared_size) if config.shared_size else None)


NOWHERE = Axes()
"""All tokens and experts are here."""


class Block(nn.Module):
    """What is repeated, and what `fully_shard` gathers at once."""

    def __init__(self, config: LlamaConfig, axes: Axes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = (
            make_experts(config, axes) if config.num_experts else FeedForward(config, config.hidden_size)
        )

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The network. Made on the meta device it costs no memory; `init` fills it once it has some.

    Set `recomputes` and only the blocks' inputs are kept for backward, which computes them again; set `length` to the
    longest sequence that will come, where it is shorter than the model's, and no angles are made beyond it.
    """

    def __init__(self, config: LlamaConfig, axes: Axes = NOWHERE) -> None:
        super().__init__()
        self.config = config
        self.recomputes = False
        self.length = config.max_length
        self.embedding = nn.Embedding(config.vocabulary_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, axes) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocabulary_size, bias=False)
        if config.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) int64 -> logits of each one's next token (B, S, vocabulary)."""
        x = self.embedding(tokens)
        rotation = rotation_of(self.config, own_positions(self.length, tokens.device))
        for block in self.blocks:
            if self.recomputes and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation)
        return self.head(self.norm(x))

    def init(self, seed: int = 0) -> None:
        """Draw all parameters that are there: each from its own name's seed, so that it matters not who has which."""
        for name, parameter in self.named_parameters():
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if parameter.ndim == 1:  # a norm's
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self._std(name, input_size=parameter.shape[-1]))

    def _std(self, name: str, input_size: int) -> float:
        if name.startswith("embedding") and not self.config.is_tied:
            return EMBEDDING_STD
        if name.endswith(("output.weight", "down.weight", "down_proj")):
            return (input_size * 2 * self.config.num_layers) ** -0.5  # layers add up along the residual path
        return input_size**-0.5


def rotation_of(config: LlamaConfig, positions: Tensor) -> Tensor:
    """Cosines and sines of the positions' angles: (2, number of positions, E / 2), in fp32."""
    angles = torch.outer(positions, frequencies(config, positions.device))
    return torch.stack((angles.cos(), angles.sin()))


def frequencies(config: LlamaConfig, device: torch.device | None = None) -> Tensor:
    """Angles per position: (E / 2,), in fp32.

    Llama 3.1 slows down those that turn less than `high_frequency_factor` times within the original length, those that
    turn less than `low_frequency_factor` times by all of `factor` (transformers, modeling_rope_utils, "llama3").
    """
    E, scaling = config.head_size, config.rotary_scaling
    plain = 1.0 / config.rotary_base ** (torch.arange(0, E, 2, device=device) / E)
    if scaling is None:
        return plain
    num_turns = scaling.original_length * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((num_turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of elements (i, i + E / 2) by its position's angle, so that products depend on distances only."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)
