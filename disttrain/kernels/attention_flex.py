"""FlexAttention by rules: what of a rule a kernel is compiled with, and the blocks that it may skip.

Which blocks of queries see which blocks of keys follows from the masks' word on blocks: nothing of queries times keys
is computed for it. It is kept for the next layers, of a few rules; kernels are compiled once for each kind of rule.

Source: Dong et al., "Flex Attention" (arXiv 2412.05496).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Any, Final, NamedTuple, cast

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from disttrain.kernels.attention_rules import (
    BLOCK_SIZE,
    Blocks,
    Places,
    Rule,
    changed,
    changes_of,
    masks_of,
    name_of,
    seen,
)

Score = Callable[..., torch.Tensor]
_NUM_KEPT: Final = 16
_NUM_KERNELS: Final = 64


class Prepared(NamedTuple):
    """A rule as FlexAttention wants it."""

    score: Score | None
    blocks: BlockMask | None


def flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule | None, scale: float | None
) -> torch.Tensor:
    """Within a graph it becomes part of that; else a graph of its own."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if torch.compiler.is_compiling():
        prepared = prepare(rule, query.shape[2], key.shape[2], query.device)
        return cast(
            torch.Tensor,
            flex_attention(query, key, value, score_mod=prepared.score, block_mask=prepared.blocks, **options),
        )
    prepared = _KEPT.prepared(rule, query.shape[2], key.shape[2], query.device)
    run = _compiled(name_of(rule))
    return cast(torch.Tensor, run(query, key, value, score_mod=prepared.score, block_mask=prepared.blocks, **options))


def prepare(rule: Rule | None, num_queries: int, num_keys: int, device: torch.device) -> Prepared:
    """Compute a rule's blocks: a few operators on (B or 1, blocks of queries, blocks of keys)."""

    def score(one: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        return changed(rule, one, Places(*places))

    def mask(*places: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, seen(rule, Places(*places)))

    own_score = score if changes_of(rule) else None
    if not masks_of(rule):
        return Prepared(own_score, None)
    some, every = block_masks(rule, num_queries, num_keys, device)
    blocks = BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=mask,
        seq_lengths=(num_queries, num_keys),
    )
    return Prepared(own_score, blocks)


def block_masks(
    rule: Rule | None, num_queries: int, num_keys: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a block of queries may see some key of a block, and where it sees all: (B or 1, 1, blocks, blocks)."""
    (first_query, last_query), (first_key, last_key) = (_ends(size, device) for size in (num_queries, num_keys))
    blocks = Blocks(first_query[:, None], last_query[:, None], first_key[None], last_key[None])
    # A block that reaches over the end is never whole: there the kernel asks for each place.
    every = (blocks.last_query - blocks.first_query == BLOCK_SIZE - 1) & (
        blocks.last_key - blocks.first_key == BLOCK_SIZE - 1
    )
    some = torch.ones_like(every)
    for mask in masks_of(rule):
        maybe, surely = mask.sees_blocks(blocks)
        some, every = some & maybe, every & surely
    some, every = (one.unsqueeze(-3) for one in torch.broadcast_tensors(some, every))
    # Not by view: what a -1 stands for is more than Inductor can divide out where lengths are symbols.
    return (some, every) if some.dim() == 4 else (some.unsqueeze(0), every.unsqueeze(0))


def _ends(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last place of each block of a dim of `size`."""
    first = torch.arange(0, size, BLOCK_SIZE, device=device)
    return first, (first + BLOCK_SIZE - 1).clamp(max=size - 1)


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries takes, and which, those first."""
    taken = blocks.to(torch.int32)
    return taken.sum(-1, dtype=torch.int32), taken.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


class _Kept:
    """The rules prepared last. Those with tensors are told apart as objects, others by their numbers."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._prepared: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()

    def prepared(self, rule: Rule | None, num_queries: int, num_keys: int, device: torch.device) -> Prepared:
        key = (rule, num_queries, num_keys, device)
        with self._lock:
            found = self._prepared.get(key)
            if found is not None:
                self._prepared.move_to_end(key)
                return found
        # Tensors made in inference mode would be of no use in training.
        with torch.inference_mode(False), torch.no_grad():
            found = prepare(rule, num_queries, num_keys, device)
        # Memory that a graph being captured has taken is written again when that is replayed.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            with self._lock:
                self._prepared[key] = found
                while len(self._prepared) > _NUM_KEPT:
                    self._prepared.popitem(last=False)
        return found


_KEPT: Final = _Kept()


@lru_cache(_NUM_KERNELS)
def _compiled(kind: str) -> Callable[..., Any]:
    """FlexAttention for one kind of rule; a second length makes it compile for all."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    # Dynamo counts compilations by code, and gives up after a few.
    run.__code__ = run.__code__.replace()
    return torch.compile(run, fullgraph=True)
