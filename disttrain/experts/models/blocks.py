"""Blocks that choose experts and call them in their own forward: what they choose, found by trial."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from disttrain.experts.models.layers import by_inputs

_COUNTS: Final = ("top_k", "num_experts_per_tok", "topk", "k", "num_experts_per_token", "moe_top_k", "n_activated")
_SCALES: Final = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
_MOST: Final = 8
"""Experts of a token that are tried where no attribute tells."""


@dataclass(frozen=True)
class RoutingRule:
    """The rule by which logits (tokens, experts) become weights and indices.

    Args: score  "softmax", "sigmoid", or "late", the softmax of the chosen ones;  is_wide  in fp32.
    """

    k: int
    score: str
    is_wide: bool = True
    is_renormalized: bool = False
    scale: float = 1.0

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.float() if self.is_wide and self.score != "late" else logits
        if self.score != "late":
            scores = scores.softmax(-1) if self.score == "softmax" else scores.sigmoid()
        weights, indices = scores.topk(self.k, dim=-1)
        if self.score == "late":
            weights = weights.softmax(-1, dtype=torch.float32 if self.is_wide else weights.dtype)
        if self.is_renormalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scale if self.scale != 1.0 else weights, indices


@dataclass(frozen=True)
class BlockForward:
    """A forward: tokens are routed, their experts mixed, and what all tokens go through is added.

    Args: router, experts  names;  choice  of a router that gives logits; None: it chooses itself.
          shared, shared_gate  names of the module for all tokens and of the linear layer of its gate, or empty.
          is_by_inputs   experts are given tokens times weights.
          returned_index  which tensor of the router's follows the output; None: none.
          is_whole  the router is given x as it comes;  is_flat  the output is (tokens, D), whatever dims x has.
    """

    router: str
    experts: str
    choice: RoutingRule | None
    shared: str = ""
    shared_gate: str = ""
    is_by_inputs: bool = False
    returned_index: int | None = None
    is_whole: bool = False
    is_flat: bool = False

    def __call__(self, module: nn.Module, x: torch.Tensor) -> Any:
        jitter = next((getattr(module, name) for name in _JITTERS if getattr(module, name, None)), 0.0)
        if module.training and jitter > 0:
            x = x * torch.empty_like(x).uniform_(1.0 - jitter, 1.0 + jitter)
        tokens = x.reshape(-1, x.shape[-1])
        result = getattr(module, self.router)(x if self.is_whole else tokens)
        results = [result] if isinstance(result, torch.Tensor) else [*result]
        weights, indices = self._chosen(results)
        experts = getattr(module, self.experts)
        if self.is_by_inputs:
            out = by_inputs(experts, tokens, indices, weights)
        else:
            out = experts(tokens, indices, weights.to(tokens.dtype))
        out = out.view(x.shape)
        if self.shared:
            shared = getattr(module, self.shared)(x)
            if self.shared_gate:
                shared = getattr(module, self.shared_gate)(x).sigmoid() * shared
            out = out + shared
        if self.is_flat:
            out = out.flatten(0, -2)
        return out if self.returned_index is None else (out, results[self.returned_index])

    def _chosen(self, results: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.choice is not None:
            logits = results[0]
            return self.choice(logits.reshape(-1, logits.shape[-1]))
        tensors = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        indices = next(tensor for tensor in tensors if not tensor.is_floating_point())
        weights = next(tensor for tensor in tensors if tensor is not indices and tensor.shape == indices.shape)
        k = indices.shape[-1]
        return weights.reshape(-1, k), indices.reshape(-1, k)


@dataclass(frozen=True)
class _Scores:
    """A router's scores (tokens, experts) are zero but for the chosen ones."""

    k: int

    def __call__(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = scores.topk(self.k, dim=-1)
        return weights, indices


_JITTERS: Final = ("jitter_noise", "router_jitter_noise", "input_jitter_noise")


def block_forwards(module: nn.Module, experts: str, num_experts: int, *, is_batched: bool) -> Iterator[BlockForward]:
    """Lists what the forward of a block with such experts may be, the most likely first.

    Args: is_batched  the experts' own forward takes as many rows for each expert, which a block gives them.
    """
    children = [name for name, _ in module.named_children() if name != experts]
    shared = [name for name in children if "shared" in name]
    routers = [name for name in children if name not in shared and _has_rows(getattr(module, name), num_experts)]
    shared_experts = [name for name in shared if "gate" not in name]
    gates = [name for name in shared if "gate" in name]
    counts = _numbers(module, _COUNTS) or [*range(1, min(num_experts, _MOST) + 1)]
    counts = [k for k in counts if k <= num_experts]
    scales = [*(scale for scale in _scales(module) if scale != 1.0), 1.0]
    choices: list[Any] = [None] if not is_batched else []
    choices += [_Scores(k) for k in counts] if is_batched else list(_choices(counts, scales))
    ways = itertools.product((False, True), routers, choices, (*shared_experts, ""), (*gates, ""), (None, 0, 1, 2))
    for is_flat, router, choice, for_all, gate, index in ways:
        if for_all or not gate:
            is_whole = choice is None
            yield BlockForward(router, experts, choice, for_all, gate, is_batched, index, is_whole, is_flat)


def _choices(counts: Sequence[int], scales: Sequence[float]) -> Iterator[RoutingRule]:
    for scale in scales:
        for score in ("softmax", "late", "sigmoid"):
            for is_renormalized in (True, False) if score != "late" else (False,):
                for is_wide in (True, False):
                    for k in counts:
                        yield RoutingRule(k, score, is_wide, is_renormalized, scale)


def _has_rows(module: nn.Module, count: int) -> bool:
    return any(value.dim() == 2 and len(value) == count for value in module.parameters())


def _numbers(module: nn.Module, names: Sequence[str]) -> list[int]:
    parts = [vars(part) for part in module.modules()]
    parts += [vars(value) for part in list(parts) for value in part.values() if hasattr(value, "__dict__")]
    return list(dict.fromkeys(part[name] for part in parts for name in names if type(part.get(name)) is int))


def _scales(module: nn.Module) -> list[float]:
    return [float(part[name]) for part in map(vars, module.modules()) for name in _SCALES if name in part]
