"""A mixture of experts from torch's own operators, the way torchtitan's layer goes.

Tokens are gathered in the order of their experts, whose groups are padded to multiples of 8 rows; three grouped
products with an activation between; results are scattered back and added. Source: torchtitan/models/moe/moe.py
(github.com/pytorch/torchtitan), whose steps these are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd

_LINE = 8


def mixture(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """(tokens, D) of indices and weights (tokens, k), gate and up (experts, H, D), down (experts, D, H)."""
    num_experts, k, dim = len(gate), indices.shape[1], x.shape[1]
    counts = torch.histc(indices.view(-1).float(), bins=num_experts, min=0, max=num_experts).to(torch.int32)
    order = torch.argsort(indices.view(-1), stable=True)
    scores = weights.view(-1)[order]
    tokens = (order // k)[:, None].expand(-1, dim)
    routed = torch.gather(x, 0, tokens)
    padded, rows, ends = _pad(routed, counts, num_experts)
    hidden = F.silu(F.grouped_mm(padded, gate.transpose(1, 2), offs=ends))
    hidden = hidden * F.grouped_mm(padded, up.transpose(1, 2), offs=ends)
    results = F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    results = results[rows]
    results = (results.float() * scores[:, None]).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, tokens, results)


def _pad(
    routed: torch.Tensor, counts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with gaps, so that each expert's begin at a multiple of a line; where each went; and the ends."""
    sizes = (counts + _LINE - 1) // _LINE * _LINE
    ends = sizes.cumsum(0).to(torch.int32)
    shift = (ends - sizes) - (counts.cumsum(0) - counts)
    experts = torch.searchsorted(counts.cumsum(0), torch.arange(len(routed), device=routed.device), right=True)
    rows = torch.arange(len(routed), device=routed.device) + shift[experts.clamp(max=num_experts - 1)]
    padded = routed.new_zeros(len(routed) + num_experts * _LINE, routed.shape[1])
    return padded.index_copy(0, rows, routed), rows, ends


def mixture_over(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    group: Any,
) -> torch.Tensor:
    """As `mixture`, where each rank of torch's `group` has as many experts, and gate, up and down are its own.

    Numbers of rows go first and are read by the host; rows go by an all-to-all of these sizes, and back.
    """
    num_ranks, num_local, k, dim = group.size(), len(gate), indices.shape[1], x.shape[1]
    num_experts = num_ranks * num_local
    counts = torch.histc(indices.view(-1).float(), bins=num_experts, min=0, max=num_experts).to(torch.int64)
    order = torch.argsort(indices.view(-1), stable=True)
    scores = weights.view(-1)[order]
    tokens = (order // k)[:, None].expand(-1, dim)
    routed = torch.gather(x, 0, tokens)
    come = torch.empty_like(counts)
    torch.distributed.all_to_all_single(come, counts, group=group)
    sent = counts.view(num_ranks, -1).sum(1).tolist()
    received = come.view(num_ranks, -1).sum(1).tolist()
    rows = all_to_all_single_autograd(routed, received, sent, group)
    # What comes lies by rank and then by expert.
    owners = (
        torch.arange(num_local, device=x.device).repeat(num_ranks).repeat_interleave(come, output_size=sum(received))
    )
    by_expert = torch.argsort(owners, stable=True)
    padded, places, ends = _pad(rows[by_expert], come.view(num_ranks, -1).sum(0), num_local)
    hidden = F.silu(F.grouped_mm(padded, gate.transpose(1, 2), offs=ends))
    hidden = hidden * F.grouped_mm(padded, up.transpose(1, 2), offs=ends)
    results = F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)[places]
    results = torch.empty_like(results).index_copy(0, by_expert, results)
    home = all_to_all_single_autograd(results, sent, received, group)
    home = (home.float() * scores[:, None]).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, tokens, home)
