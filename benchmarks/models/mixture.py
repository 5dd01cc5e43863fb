"""A mixture of experts in place of a block's feed-forward part: by ours, or by torch's operators as torchtitan's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from experts import reference
from torch import Tensor, nn

from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.products import mix_experts
from disttrain.kernels.grouped.rows import sort_by_expert


class Mixture(nn.Module):
    """top_k of `experts` SwiGLU layers for each token, weighted by the softmax of its scores, renormalised."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, D) -> (B, S, D)."""
        tokens = x.flatten(0, 1)
        weights, indices = F.softmax(self.router(tokens).float(), dim=-1).topk(self.top_k, dim=-1)
        return self._mixed(tokens, indices, weights / weights.sum(-1, keepdim=True)).view_as(x)

    def _mixed(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError


class TorchMixture(Mixture):
    """By `experts.reference`."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__(dim, hidden, num_experts, top_k)
        self.gate, self.up = (nn.Parameter(torch.empty(num_experts, hidden, dim)) for _ in range(2))

    def _mixed(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return reference.mixture(tokens, indices, weights, self.gate, self.up, self.down)


class OurMixture(Mixture):
    """By the kernels."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__(dim, hidden, num_experts, top_k)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden, dim))

    def _mixed(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        order = sort_by_expert(indices, self.down.shape[0])
        return mix_experts(tokens, order, weights, self.gate_up, self.down, GatedForm())
