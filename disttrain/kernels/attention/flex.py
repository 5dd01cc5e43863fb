"""FlexAttention by rules: the functions that a kernel is compiled with, and the blocks that it may skip.

The masks say for whole blocks which blocks of queries see which blocks of keys, so nothing of the size of queries times
keys is computed for that. The result is cached for the next layers, for a few rules. Kernels are compiled once for each
kind of rule.

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

from disttrain.kernels.attention.rules import (
    BLOCK_SIZE,
    Blocks,
    Causal,
    Documents,
    Mask,
    Prefix,
    Rule,
    Rules,
    ScoreIndices,
    SlidingWindow,
    changed,
    changes_of,
    masks_of,
    name_of,
    seen,
)
from disttrain.kernels.operators import define
from disttrain.kernels.recording import kept_for_graph

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
    """Attention by FlexAttention. Within a graph it becomes part of that; else a graph of its own."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if torch.compiler.is_compiling():
        prepared = prepare(rule, query, key.shape[2])
        return cast(
            torch.Tensor,
            flex_attention(query, key, value, score_mod=prepared.score, block_mask=prepared.blocks, **options),
        )
    prepared = _KEPT.prepared(rule, query, key.shape[2])
    run = _compiled(name_of(rule), torch.are_deterministic_algorithms_enabled())
    return cast(torch.Tensor, run(query, key, value, score_mod=prepared.score, block_mask=prepared.blocks, **options))


def prepare(rule: Rule | None, query: torch.Tensor, num_keys: int) -> Prepared:
    """A rule for queries like `query`; its blocks are computed by one operator, on a graph's behalf too."""

    def score(element: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        return changed(rule, element, ScoreIndices(*indices))

    def mask(*indices: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, seen(rule, ScoreIndices(*indices)))

    own_score = score if changes_of(rule) else None
    masks = masks_of(rule)
    if not masks:
        return Prepared(own_score, None)
    kinds, sizes, tensors = [type(part).__name__ for part in masks], [0] * len(masks), []
    for number, part in enumerate(masks):
        if isinstance(part, SlidingWindow):
            sizes[number] = part.size
        elif isinstance(part, Documents):
            tensors.append(part.ids)
        elif isinstance(part, Prefix):
            tensors.append(part.lengths)
    lengths = (query.shape[2], num_keys)
    block_tables = torch.ops.disttrain.attention_blocks(query.detach(), kinds, sizes, tensors, *lengths)
    make: Callable[..., BlockMask] = BlockMask
    return Prepared(own_score, make(lengths, *block_tables, BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE), mask_mod=mask))


def _blocks(
    like: torch.Tensor, kinds: list[str], sizes: list[int], tensors: list[torch.Tensor], num_queries: int, num_keys: int
) -> list[torch.Tensor]:
    """The tables of BlockMask: of blocks seen in part and of blocks seen whole, by queries, then by keys."""
    values = iter(tensors)
    masks: list[Mask] = []
    for kind, size in zip(kinds, sizes, strict=True):
        match kind:
            case "SlidingWindow":
                masks.append(SlidingWindow(size))
            case "Documents":
                masks.append(Documents(next(values)))
            case "Prefix":
                masks.append(Prefix(next(values)))
            case _:
                masks.append(Causal())
    some, every = block_masks(Rules(tuple(masks)), num_queries, num_keys, like.device)
    pairs = (some & ~every, every)
    by_queries = [table for blocks in pairs for table in ordered(blocks)]
    return by_queries + [table for blocks in pairs for table in ordered(blocks.mT)]


def _shapes_of_blocks(
    like: torch.Tensor, kinds: list[str], sizes: list[int], tensors: list[torch.Tensor], num_queries: int, num_keys: int
) -> list[torch.Tensor]:
    values = iter(tensors)
    batch_size = 1
    for kind in kinds:
        if kind in ("Documents", "Prefix"):
            value = next(values)
            batch_size = value.shape[0] if kind == "Prefix" or value.dim() == 2 else batch_size
    rows, columns = ((size + BLOCK_SIZE - 1) // BLOCK_SIZE for size in (num_queries, num_keys))
    return [
        like.new_empty((batch_size, 1, *shape), dtype=torch.int32)
        for shape in 2 * [(rows,), (rows, columns)] + 2 * [(columns,), (columns, rows)]
    ]


# Inductor (torch 2.11) cannot divide numbers of blocks by each other where lengths are symbols.
define(
    "attention_blocks(Tensor like, str[] kinds, int[] sizes, Tensor[] tensors, SymInt num_queries, SymInt num_keys)"
    " -> Tensor[]",
    _blocks,
    _shapes_of_blocks,
)


def block_masks(
    rule: Rule | None, num_queries: int, num_keys: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of blocks of keys that a block of queries may see some of, and sees all of: (B or 1, 1, blocks, blocks)."""
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
    some, every = (block_mask.unsqueeze(-3) for block_mask in torch.broadcast_tensors(some, every))
    return (some, every) if some.dim() == 4 else (some.unsqueeze(0), every.unsqueeze(0))


def _ends(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last place of each block of a dim of `size`."""
    first = torch.arange(0, size, BLOCK_SIZE, device=device)
    return first, (first + BLOCK_SIZE - 1).clamp(max=size - 1)


def ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of blocks of keys that each block of queries takes, and their indices first; contiguous, as kernels
    read them."""
    # Sorted, a transposed tensor stays transposed.
    taken = blocks.to(torch.int32).contiguous()
    return taken.sum(-1, dtype=torch.int32), taken.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


class _Kept:
    """The rules prepared last. Those with tensors are told apart as objects, others by their numbers."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._prepared: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()

    def prepared(self, rule: Rule | None, query: torch.Tensor, num_keys: int) -> Prepared:
        key = (rule, query.shape[2], num_keys, query.device)
        with self._lock:
            prepared = self._prepared.get(key)
            if prepared is not None:
                self._prepared.move_to_end(key)
                return kept_for_graph(prepared, query.device)
        # Tensors made in inference mode would be of no use in training.
        with torch.inference_mode(False), torch.no_grad():
            prepared = prepare(rule, query, num_keys)
        # Memory that a graph being captured has taken is written again when that is replayed.
        if not query.is_cuda or not torch.cuda.is_current_stream_capturing():
            with self._lock:
                self._prepared[key] = prepared
                while len(self._prepared) > _NUM_KEPT:
                    self._prepared.popitem(last=False)
        return prepared


_KEPT: Final = _Kept()


@lru_cache(_NUM_KERNELS)
def _compiled(kind: str, is_deterministic: bool) -> Callable[..., Any]:
    """FlexAttention for one kind of rule; a second length makes it compile for all.

    A kernel for one length rounds unlike that for all: deterministic ones are for all from the first on.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    # Dynamo counts compilations by code, and gives up after a few.
    run.__code__ = run.__code__.replace()
    return torch.compile(run, fullgraph=True, dynamic=True if is_deterministic else None)
