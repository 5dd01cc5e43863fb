"""Awkward arguments for the operators of experts; see `kernel_operators.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from disttrain.kernels.grouped.rows import ExpertOrder, sort_by_expert
from tests.cases.experts import Experts, drawn_experts, forms

OPS: Any = torch.ops.disttrain
Case = tuple[Any, ...]
NUM_EXPERTS = 4


def sorts() -> Iterator[Case]:
    for indices in (_indices(7, 2).view(-1), _indices(2, 7).int().view(-1)[::3], _indices(0, 1).view(-1)):
        yield indices, NUM_EXPERTS


def takes() -> Iterator[Case]:
    for x, order, k in _tokens():
        yield x, *order, k


def sums() -> Iterator[Case]:
    for x, order, k in _tokens():
        yield OPS.expert_take(x, *order, k), order.slots, order.ends, k


def combinations() -> Iterator[Case]:
    for x, order, k in _tokens():
        yield OPS.expert_take(x, *order, k), *order, torch.rand(k, len(x)).T


def combination_backwards() -> Iterator[Case]:
    for rows, *order, weights in combinations():
        yield torch.ones((), dtype=rows.dtype).expand(len(weights), rows.shape[1]), rows, *order, weights


def linears() -> Iterator[Case]:
    for x, order, k in _tokens():
        rows = OPS.expert_take(x, *order, k)
        bias = torch.ones(NUM_EXPERTS, 5, dtype=x.dtype)
        yield rows, torch.ones(NUM_EXPERTS, 5, 6, dtype=x.dtype), order.ends, None, False
        yield rows, torch.ones(NUM_EXPERTS, 6, 5, dtype=x.dtype), order.ends, bias, True


def linear_backwards() -> Iterator[Case]:
    for rows, weight, ends, bias, is_transposed in linears():
        yield torch.ones((), dtype=rows.dtype).expand(len(rows), 5), rows, weight, ends, bias, is_transposed


def mlps() -> Iterator[Case]:
    for form, is_apart, has_bias in forms():
        for x, order, k in _tokens():
            tensors = _arguments(drawn_experts(NUM_EXPERTS, 6, 4, form, is_apart, has_bias), x.dtype)
            plain = form.activation, form.is_interleaved, form.is_transposed, form.limit, form.alpha, ""
            yield x, order.ends, order.order, order.slots, torch.rand(k, len(x), dtype=x.dtype).T, *tensors, *plain
            yield OPS.expert_take(x, *order, k), order.ends, None, None, None, *tensors, *plain


def mlp_backwards() -> Iterator[Case]:
    for number, case in enumerate(mlps()):
        x, wanted = case[0], ((True, True), (True, False), (False, True))[number % 3]
        grad = torch.ones((), dtype=x.dtype).expand(x.shape)
        yield grad, *case[:10], *OPS.expert_mlp(*case)[1:], *case[10:], *wanted


def _tokens() -> Iterator[tuple[torch.Tensor, ExpertOrder, int]]:
    for number, (num_tokens, k) in enumerate(((7, 2), (5, 1), (0, 2))):
        x = torch.rand(6, num_tokens, dtype=(torch.float32, torch.bfloat16, torch.float64)[number]).T
        yield x, sort_by_expert(_indices(num_tokens, k), NUM_EXPERTS), k


def _indices(num_tokens: int, k: int) -> torch.Tensor:
    return torch.randint(-1, NUM_EXPERTS + 1, (num_tokens, k), generator=torch.Generator().manual_seed(num_tokens))


def _arguments(experts: Experts, dtype: torch.dtype) -> list[torch.Tensor | None]:
    tensors = [*[*experts.halves, None][:2], experts.down, experts.gate_up_bias, experts.down_bias]
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


EXPERT_CASES = {
    "expert_combine": combinations,
    "expert_combine_backward": combination_backwards,
    "expert_mlp": mlps,
    "expert_mlp_backward": mlp_backwards,
    "expert_sort": sorts,
    "expert_sum": sums,
    "expert_take": takes,
    "grouped_linear": linears,
    "grouped_linear_backward": linear_backwards,
}
