"""Chooses the cut of a sequence whose ranks have equal work under a rule, and of those the one that sends least. Pure.

Work is counted in pairs of a query and a key, by blocks, as attention skips them. What is sent are the keys and values
that a rank needs of others. Both follow from a rule's blocks alone, all of them at once, so that a sequence of many
documents, cut into many runs, is planned as fast as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from disttrain.errors import ShapeError
from disttrain.kernels.attention.context.parts import Parts, by_document, by_window, contiguous, mirrored
from disttrain.kernels.attention.context.planning.tiles import on_host
from disttrain.kernels.attention.rules import (
    BLOCK_SIZE,
    Blocks,
    Causal,
    Documents,
    Prefix,
    Rule,
    SlidingWindow,
    masks_of,
)

_NUM_KEPT = 64
_SLACK = 0.02
"""Work within so much of the least counts as equal."""


@dataclass(frozen=True)
class CutPlan:
    """A cut of a sequence, and what it costs under a rule; it prints as a table."""

    name: str
    """contiguous, mirrored, by_document or by_window."""
    parts: Parts
    work: tuple[float, ...]
    """Of each rank, the pairs of a query and a key that it computes; blocks that are seen in part count half."""
    num_received: tuple[int, ...]
    """Of each rank, the keys of others that some of its queries see."""

    @property
    def imbalance(self) -> float:
        """The excess over the mean of the rank with most work: 0.02 for 2 %."""
        total = sum(self.work)
        return max(self.work) * len(self.work) / total - 1 if total else 0.0

    def __str__(self) -> str:
        first, *ranks = str(self.parts).splitlines()
        costs = zip(ranks, self.work, self.num_received, strict=True)
        return "\n".join(
            [
                f"{first}, {self.name}: {100 * self.imbalance:.1f} % more work than the mean at most",
                *(f"{rank}; {work:.4g} pairs, {number} keys of others" for rank, work, number in costs),
            ]
        )


@lru_cache(_NUM_KEPT)
def plan_cut(rule: Rule | None, length: int, num_ranks: int) -> CutPlan:
    """The cut of `length` positions over the ranks of an axis for attention by `rule`.

    Of contiguous, mirrored, by_document and by_window those whose most loaded rank has within 2 % of the least work; of
    these the one whose busiest rank receives least, the simplest of equals. A batch is cut alike in all its sequences.
    Plans are kept by the rule's identity, as what is derived from its tensors is.
    Raises: ShapeError for documents of another length.
    """
    if length < 0 or num_ranks < 1:
        raise ShapeError("plan_cut", f"there are {length} positions and {num_ranks} ranks.", "Give 0, and 1, or more.")
    for mask in masks_of(rule):
        if isinstance(mask, Documents) and mask.ids.shape[-1] != length:
            problem = f"Documents has ids of shape {tuple(mask.ids.shape)}, the sequence {length} positions."
            raise ShapeError("plan_cut", problem, "Give the ids of the whole sequence.")
    cuts = plan_cuts(rule, length, num_ranks)
    least = min(max(cut.work) for cut in cuts)
    return min((cut for cut in cuts if max(cut.work) <= (1 + _SLACK) * least), key=lambda cut: max(cut.num_received))


def plan_cuts(rule: Rule | None, length: int, num_ranks: int) -> tuple[CutPlan, ...]:
    """All that `plan_cut` compares; simple ones first."""
    host_rule = on_host(rule)
    cuts = {"contiguous": contiguous(length, num_ranks), "mirrored": mirrored(length, num_ranks)}
    lengths = _document_lengths(host_rule, length)
    if len(lengths) > 1:
        cuts["by_document"] = by_document(lengths, num_ranks)
    if windows := [mask.size for mask in masks_of(host_rule) if isinstance(mask, SlidingWindow)]:
        is_causal = any(isinstance(mask, Causal | Prefix) for mask in masks_of(host_rule))
        cuts["by_window"] = by_window(lengths, num_ranks, min(windows), is_causal=is_causal)
    return tuple(CutPlan(name, parts, *_costs(parts, host_rule)) for name, parts in cuts.items())


def _document_lengths(rule: Rule | None, length: int) -> list[int]:
    """Lengths of runs of equal ids; all sequences of a batch count, whose documents may begin elsewhere."""
    begins = torch.zeros(max(0, length - 1), dtype=torch.bool)
    for mask in masks_of(rule):
        if isinstance(mask, Documents):
            changes = mask.ids[..., 1:] != mask.ids[..., :-1]
            begins |= changes if changes.dim() == 1 else changes.any(0)
    bounds = [0, *(begins.nonzero().flatten() + 1).tolist(), length]
    return [stop - start for start, stop in pairwise(bounds) if stop > start]


def _costs(parts: Parts, rule: Rule | None) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Each rank's work, and the number of keys that it receives."""
    blocks = [_blocks(parts, rank) for rank in range(parts.num_ranks)]
    first_key, last_key = (torch.cat(ends) for ends in zip(*blocks, strict=True))
    owners = torch.repeat_interleave(torch.arange(parts.num_ranks), torch.tensor([len(first) for first, _ in blocks]))
    widths = (last_key - first_key + 1).float()
    work, num_received = [], []
    for rank, ends in enumerate(blocks):
        total, is_needed = 0.0, torch.zeros(len(first_key), dtype=torch.bool)
        for first, last in _few_at_a_time(*ends, len(first_key)):
            some, every = _seen(rule, Blocks(first[:, None], last[:, None], first_key[None], last_key[None]))
            # Whole numbers, of a row below 2^24 and in all below 2^53: the same in whatever order they are added.
            seen = (some.to(torch.uint8) + every).float() @ widths
            total += float((last - first + 1).double() @ seen.double()) / 2
            is_needed |= some.any(0)
        work.append(total)
        num_received.append(int(widths[is_needed & (owners != rank)].sum()))
    return tuple(work), tuple(num_received)


def _blocks(parts: Parts, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last positions of the blocks of a rank's runs."""
    firsts = [torch.arange(run.start, run.stop, BLOCK_SIZE) for run in parts.ranges[rank]]
    lasts = [
        (first + BLOCK_SIZE - 1).clamp(max=run.stop - 1) for first, run in zip(firsts, parts.ranges[rank], strict=True)
    ]
    empty = torch.empty(0, dtype=torch.int64)
    return torch.cat([empty, *firsts]), torch.cat([empty, *lasts])


_NUM_AT_ONCE = 1 << 22


def _few_at_a_time(
    first: torch.Tensor, last: torch.Tensor, num_keys: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    step = max(1, _NUM_AT_ONCE // max(1, num_keys))
    yield from zip(first.split(step), last.split(step), strict=True)


def _seen(rule: Rule | None, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    some = every = torch.ones(blocks.first_query.shape[0], blocks.first_key.shape[1], dtype=torch.bool)
    for mask in masks_of(rule):
        maybe, surely = mask.sees_blocks(blocks)
        some, every = some & maybe, every & surely
    if some.dim() > 2:
        # Sequences of a batch that see different keys are computed together.
        some, every = some.flatten(0, -3).any(0), every.flatten(0, -3).all(0)
    return some, every
