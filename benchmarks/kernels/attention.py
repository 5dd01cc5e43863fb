"""Times each implementation of attention on this machine, for causal masks, windows and documents.

`torch` is what a model calls: scaled_dot_product_attention, which chooses by itself, with a mask in memory where it is
more than causal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from disttrain.kernels.attention.choice import Tensors, machine_of, measure
from disttrain.kernels.attention.operator import call_of
from disttrain.kernels.attention.plan import SDPA, serving
from disttrain.kernels.attention.rules import Alibi, Causal, Documents, Prefix, Rule, SlidingWindow, SoftCap, seen
from disttrain.kernels.attention.runs import indices_of


class Sizes(NamedTuple):
    """Of all cases; `window` in keys, `document` in elements on average."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: Sequence[int]
    window: int
    document: int


@dataclass(frozen=True)
class Timed:
    """Median seconds of each that serves, and the operations of the products of what is seen."""

    name: str
    is_whole_step: bool
    seconds: dict[str, float]
    flops: int


def timed(sizes: Sizes, device: torch.device, only: Sequence[str] = ("",)) -> Iterator[Timed]:
    """The cases whose names begin with one of `only`, in bf16; each is made when it comes."""
    for length in sizes.lengths:
        for name, rule in _rules(sizes, length, device):
            if not name.startswith(tuple(only)):
                continue
            tensors = _drawn(sizes, length, device)
            flops = _flops(sizes, length, rule, device)
            for is_whole in (False, True):
                for tensor in tensors:
                    tensor.requires_grad_(is_whole)
                call = call_of(*tensors, rule)
                names = dict.fromkeys((*serving(machine_of(device.type, device.index), call), SDPA))
                if call.has_changes:
                    del names[SDPA]
                seconds = measure(tuple(names), is_whole, tensors, rule)
                yield Timed(f"{name} {length}", is_whole, seconds, flops * 7 // 2 if is_whole else flops)


def _drawn(sizes: Sizes, length: int, device: torch.device) -> Tensors:
    """As a model's projections give them: positions before heads in memory."""
    query, key, value = (
        torch.randn(sizes.batch_size, length, heads, sizes.head_dim, device=device, dtype=torch.bfloat16).transpose(
            1, 2
        )
        for heads in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    )
    return query, key, value


def _rules(sizes: Sizes, length: int, device: torch.device) -> Iterator[tuple[str, Rule]]:
    yield "causal", Causal()
    yield f"window {sizes.window}", Causal() & SlidingWindow(sizes.window)
    draws = torch.Generator().manual_seed(0)
    ends = torch.rand(sizes.batch_size, length, generator=draws) < 1 / sizes.document
    yield f"documents {sizes.document}", Causal() & Documents(ends.cumsum(-1).to(device))
    yield "prefix", Prefix(torch.full((sizes.batch_size,), length // 4, device=device))
    yield "soft cap", Causal() & SoftCap(50.0)
    yield "alibi", Causal() & Alibi(0.5 ** torch.arange(1, sizes.num_heads + 1, device=device))


def _flops(sizes: Sizes, length: int, rule: Rule, device: torch.device) -> int:
    """Of forward; backward has five products in place of two."""
    num_seen = 0
    for batch in range(sizes.batch_size):
        local_rule = rule.local(slice(batch, batch + 1), slice(0, 1))
        is_seen = seen(local_rule, indices_of((1, 1, length, length), device))
        num_seen += length * length if is_seen is None else int(is_seen.sum())
    return 4 * num_seen * sizes.num_heads * sizes.head_dim
