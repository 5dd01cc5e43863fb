"""Attention of queries over some keys by FlexAttention, with the sums of weights: for any rule, anywhere, on GPUs.

The kernel asks the rule at the positions of a query and a key, which it looks up, and skips blocks in which nothing is
seen. Backward computes the part anew and has it differentiated: of w = exp(lse_i - lse), out = sum_i w_i out_i has the
gradients w_i dO in out_i, and w_i (dO . out_i - dO . out) in lse_i.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, cast

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from disttrain.kernels.attention.choice import machine_of
from disttrain.kernels.attention.context.blocks.dense import Places
from disttrain.kernels.attention.flex import ordered
from disttrain.kernels.attention.plan import FLEX, Call, serving
from disttrain.kernels.attention.rules import (
    BLOCK_SIZE,
    Blocks,
    Documents,
    Rule,
    ScoreIndices,
    changed,
    changes_of,
    masks_of,
    name_of,
    seen,
)

_NUM_KERNELS: Final = 64


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True where the kernel takes these tensors."""
    if not query.is_cuda:
        return False
    sizes = (query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2], query.shape[3], value.shape[3])
    call = Call(query.dtype, *sizes, window=None, has_changes=True, needs_grad=True)
    return FLEX in serving(machine_of(query.device.type, query.device.index), call)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dense.forward`."""
    run = _compiled(name_of(places.rule), torch.are_deterministic_algorithms_enabled())
    has_groups = query.shape[1] != key.shape[1]
    # Of tensors of any strides a kernel would be compiled for each.
    inputs = (tensor.contiguous() for tensor in (query, key, value))
    return cast(
        tuple[torch.Tensor, torch.Tensor],
        run(*inputs, _score_of(places), _blocks_of(places), places.scale, has_groups),
    )


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    places: Places,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `dense.backward`."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        own_out, own_lse = forward(leaves[0], leaves[1], leaves[2], places)
    grad_own_out, grad_own_lse = weighted(grad_out, out, lse, own_out.detach(), own_lse.detach())
    dquery, dkey, dvalue = torch.autograd.grad((own_out, own_lse), leaves, (grad_own_out, grad_own_lse))
    return dquery, dkey, dvalue


def weighted(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, own_out: torch.Tensor, own_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of a part's result and sums, of the gradient of the whole's result."""
    # Of who sees nothing a weight is exp(-inf).
    weights = (own_lse - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()
    grad_own_out = (grad_out * weights.unsqueeze(-1)).to(own_out.dtype)
    difference = (grad_out.to(lse.dtype) * (own_out.to(lse.dtype) - out)).sum(-1)
    return grad_own_out, (weights * difference).to(own_lse.dtype)


def _score_of(places: Places) -> Callable[..., torch.Tensor] | None:
    if not changes_of(places.rule):
        return None

    def score(
        element: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return changed(places.rule, element, ScoreIndices(batch, head, places.queries[query], places.keys[key]))

    return score


def _blocks_of(places: Places) -> BlockMask | None:
    """The blocks of the kernel's queries and keys, in which there may be runs of positions far from each other."""
    if not masks_of(places.rule):
        return None

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        indices = ScoreIndices(batch, head, places.queries[query], places.keys[key])
        return cast(torch.Tensor, seen(places.rule, indices))

    some, every = block_tables(places.rule, places.queries, places.keys)
    pairs = (some & ~every, every)
    tables = [table for blocks in pairs for table in ordered(blocks)]
    tables += [table for blocks in pairs for table in ordered(blocks.mT)]
    lengths = (len(places.queries), len(places.keys))
    make: Callable[..., BlockMask] = BlockMask
    return make(lengths, *tables, BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE), mask_mod=sees)


def block_tables(rule: Rule | None, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of blocks of keys that a block of queries may see some of, and sees all of: (B or 1, 1, blocks, blocks)."""
    rows, columns = _in_blocks(queries), _in_blocks(keys)
    # What the ends of a block say, all between them obeys.
    blocks = Blocks(rows[:, :1], rows[:, -1:], columns[None, :, 0], columns[None, :, -1])
    is_full = [
        torch.arange(1, len(each) + 1, device=all_.device) * BLOCK_SIZE <= len(all_)
        for each, all_ in ((rows, queries), (columns, keys))
    ]
    # A block that reaches over the end is never whole: there the kernel asks for each place.
    every = is_full[0][:, None] & is_full[1][None]
    some = torch.ones_like(every)
    for mask in masks_of(rule):
        maybe, surely = _documents(mask, rows, columns) if isinstance(mask, Documents) else mask.sees_blocks(blocks)
        some, every = some & maybe, every & surely
    some, every = (table.unsqueeze(-3) for table in torch.broadcast_tensors(some, every))
    return (some, every) if some.dim() == 4 else (some.unsqueeze(0), every.unsqueeze(0))


def _in_blocks(positions: torch.Tensor) -> torch.Tensor:
    """(blocks, BLOCK_SIZE): the last position fills the last block."""
    num_blocks = -(-len(positions) // BLOCK_SIZE)
    indices = torch.arange(num_blocks * BLOCK_SIZE, device=positions.device).clamp_(max=len(positions) - 1)
    return positions[indices].view(num_blocks, BLOCK_SIZE)


def _documents(mask: Documents, rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sees_blocks`, by the ids at the positions alone: those between runs are no part of a block."""
    (low, high), (key_low, key_high) = (mask.ids[..., each].aminmax(dim=-1) for each in (rows, columns))
    low, high = low.unsqueeze(-1), high.unsqueeze(-1)
    key_low, key_high = key_low.unsqueeze(-2), key_high.unsqueeze(-2)
    return (low <= key_high) & (key_low <= high), (low == high) & (key_low == key_high) & (low == key_low)


@lru_cache(_NUM_KERNELS)
def _compiled(kind: str, is_deterministic: bool) -> Callable[..., Any]:
    """FlexAttention for one kind of rule; a second length makes it compile for all.

    A kernel for one length rounds unlike that for all: deterministic ones are for all from the first on.
    """

    def run(query: Any, key: Any, value: Any, score: Any, blocks: Any, scale: float, has_groups: bool) -> Any:
        out, aux = flex_attention(
            query,
            key,
            value,
            score_mod=score,
            block_mask=blocks,
            scale=scale,
            enable_gqa=has_groups,
            return_aux=AuxRequest(lse=True),
            # torch's kernel for few queries, which it would take for fewer than 128, does not take all that come here.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
        return out, aux.lse

    # Dynamo counts compilations by code, and gives up after a few.
    run.__code__ = run.__code__.replace()
    return torch.compile(run, fullgraph=True, dynamic=True if is_deterministic else None)
