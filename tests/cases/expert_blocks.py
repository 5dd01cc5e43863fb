"""Blocks of experts as people write them, and small models of transformers that have such."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

D, H, E = 8, 6, 5


class GatedMlp(nn.Module):
    """An expert of three linear layers."""

    def __init__(self, names: tuple[str, str, str] = ("w1", "w2", "w3"), width: int = H) -> None:
        super().__init__()
        self.names = names
        gate, down, up = names
        self.add_module(gate, nn.Linear(D, width, bias=False))
        self.add_module(down, nn.Linear(width, D, bias=False))
        self.add_module(up, nn.Linear(D, width, bias=False))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, down, up = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class LoopOverHits(nn.Module):
    """The block of transformers 4's Mixtral: a softmax of all, the chosen ones renormalized, and the logits given."""

    def __init__(self, num_experts: int = E, top_k: int = 2, jitter: float = 0.0) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.jitter_noise = num_experts, top_k, jitter
        self.gate = nn.Linear(D, num_experts, bias=False)
        self.experts = nn.ModuleList(GatedMlp() for _ in range(num_experts))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, positions, width = hidden_states.shape
        if self.training and self.jitter_noise > 0:
            low, high = 1.0 - self.jitter_noise, 1.0 + self.jitter_noise
            hidden_states *= torch.empty_like(hidden_states).uniform_(low, high)
        hidden_states = hidden_states.view(-1, width)
        logits = self.gate(hidden_states)
        weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(hidden_states.dtype)
        out = torch.zeros_like(hidden_states)
        mask = F.one_hot(chosen, self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            slot, token = torch.where(mask[expert])
            out.index_add_(0, token, self.experts[expert](hidden_states[token]) * weights[token, slot, None])
        return out.view(batch, positions, width), logits


class LoopWithShared(nn.Module):
    """The block of transformers 4's Qwen2-MoE: not renormalized, and an expert for all behind a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(GatedMlp(("gate_proj", "down_proj", "up_proj")) for _ in range(E))
        self.shared_expert = GatedMlp(("gate_proj", "down_proj", "up_proj"), 10)
        self.shared_expert_gate = nn.Linear(D, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, D)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top_k, -1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            out[token] += weights[token, slot, None] * expert(tokens[token])
        return (out + self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)).view(x.shape)


class LateSoftmax(nn.Module):
    """A block of tokens (tokens, width) whose weights are the softmax of the chosen logits; k in its arguments."""

    def __init__(self, k: int = 3, *, bias: bool = False) -> None:
        super().__init__()
        self.args = {"k": k}
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, H, bias=bias), nn.ReLU(), nn.Linear(H, D, bias=bias)) for _ in range(E)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.router(inputs), self.args["k"])
        weights = F.softmax(weights, dim=1)
        results = torch.zeros_like(inputs)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            results[token] += weights[token, slot, None] * expert(inputs[token])
        return results


class GroupedChoice(nn.Module):
    """A router of two groups of experts, of which a token's come from one, as DeepSeek-V3's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E + 1, D))
        self.register_buffer("e_score_correction_bias", torch.linspace(-0.2, 0.2, E + 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.linear(x.view(-1, D), self.weight).sigmoid()
        choosing = scores + self.e_score_correction_bias
        groups = choosing.view(-1, 2, (E + 1) // 2)
        best = groups.topk(2, -1).values.sum(-1).argmax(-1)
        mask = F.one_hot(best, 2)[..., None].expand(groups.shape).reshape(choosing.shape)
        chosen = choosing.masked_fill(mask == 0, 0.0).topk(2, -1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


class RouterApart(nn.Module):
    """The block of transformers 4's DeepSeek-V3: a router that chooses, and shared experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = GroupedChoice()
        self.experts = nn.ModuleList(GatedMlp() for _ in range(E + 1))
        self.shared_experts = GatedMlp()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        residuals, shape = hidden_states, hidden_states.shape
        chosen, weights = self.gate(hidden_states)
        hidden_states = hidden_states.view(-1, shape[-1])
        out = torch.zeros_like(hidden_states, dtype=weights.dtype)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            out.index_add_(0, token, expert(hidden_states[token]) * weights[token, slot].unsqueeze(-1))
        return out.type(hidden_states.dtype).view(shape) + self.shared_experts(residuals)


class ExpertsOfTheirOwn(nn.ModuleList):
    """A ModuleList with a forward of tokens, indices and weights."""

    def __init__(self) -> None:
        super().__init__(GatedMlp() for _ in range(E))

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self):
            token, slot = torch.where(top_k_index == index)
            out.index_add_(0, token, expert(x[token]) * top_k_weights[token, slot, None])
        return out


class Chooser(nn.Module):
    """Gives the experts to a module of such."""

    def __init__(self, experts: nn.Module, k: int = 2, num_experts: int = E) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(D, num_experts, bias=False)
        self.mlp_experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, D)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.k, -1)
        return self.mlp_experts(tokens, chosen, weights).view(x.shape)


class SortedRows(nn.Module):
    """The experts of torchtitan: rows sorted by expert, and how many each has."""

    def __init__(self, num_experts: int = E) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1, self.w2, self.w3 = (
            nn.Parameter(torch.randn(num_experts, *shape) / 3) for shape in ((H, D), (D, H), (H, D))
        )

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        sizes = num_tokens_per_expert.tolist()
        parts = x[: sum(sizes)].split(sizes)
        outs = [
            (F.silu(part @ w1.T) * (part @ w3.T)) @ w2.T
            for part, w1, w2, w3 in zip(parts, self.w1, self.w2, self.w3, strict=True)
        ]
        return torch.cat([*outs, x.new_zeros(len(x) - sum(sizes), x.shape[1])])


class Sorter(nn.Module):
    """Sorts tokens by the expert of each, and back."""

    def __init__(self, num_experts: int = E) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Linear(D, num_experts, bias=False)
        self.experts = SortedRows(num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, D)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        rows = self.experts(tokens[order], torch.bincount(chosen, minlength=self.num_experts))
        return (torch.empty_like(rows).index_copy(0, order, rows) * weights[:, None]).view(x.shape)


BLOCKS: dict[str, Any] = {
    "loop_over_hits": LoopOverHits,
    "jitter": lambda: LoopOverHits(jitter=0.1),
    "shared": LoopWithShared,
    "late_softmax": LateSoftmax,
    "biases": lambda: LateSoftmax(bias=True),
    "all_chosen": lambda: LoopOverHits(top_k=E),
    "one_chosen": lambda: LoopOverHits(top_k=1),
    "router_apart": RouterApart,
    "list_with_forward": lambda: Chooser(ExpertsOfTheirOwn()),
    "sorted_rows": Sorter,
}
