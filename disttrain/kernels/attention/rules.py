"""Rules of attention, as small values: which keys a query sees, and what becomes of a score.

    rules = Causal() & SlidingWindow(4096) & SoftCap(50.0)

Masks are combined by "and"; changes of scores take place in the order written. A mask tells of whole blocks of queries
and keys, from their ends alone, so that nothing of queries times keys is needed to find those to be skipped.

Shapes: B sequences, H heads of queries, L queries, S keys. Positions count from 0 on both sides, as torch's `is_causal`
has it. A query that sees no key gives zeros.

Sources: Beltagy et al., "Longformer" (arXiv 2004.05150) for windows; Raffel et al. (1910.10683) for prefixes; Press et
al., "Train Short, Test Long" (2108.12409) for ALiBi; Gemma Team, "Gemma 2" (2408.00118) for soft caps; Dong et al.,
"Flex Attention" (2412.05496), for rules by place and by block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch


class ScoreIndices(NamedTuple):
    """Indices of elements of the scores: sequence, head, query, key, as integer tensors that broadcast."""

    batch: torch.Tensor
    head: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor


class Blocks(NamedTuple):
    """First and last place of blocks of queries, (num_blocks, 1), and of blocks of keys, (1, num_blocks)."""

    first_query: torch.Tensor
    last_query: torch.Tensor
    first_key: torch.Tensor
    last_key: torch.Tensor


class Rule:
    """A mask or a change of scores, or several of them."""

    def __and__(self, other: Rule) -> Rule:
        return Rules((*parts_of(self), *parts_of(other)))

    def local(self, batch: slice, heads: slice) -> Rule:
        """The rule for these sequences and heads alone; itself where it is the same, since caches go by identity."""
        return self


class Mask(Rule, ABC):
    """Decides which keys a query sees."""

    @abstractmethod
    def sees(self, indices: ScoreIndices) -> torch.Tensor:
        """True where the query sees the key."""

    @abstractmethod
    def sees_blocks(self, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """(B or none, blocks of queries, blocks of keys): where some query may see some key, where all see all."""


class ScoreChange(Rule, ABC):
    """Computes a score anew, from the scaled product of query and key."""

    @abstractmethod
    def changed(self, score: torch.Tensor, indices: ScoreIndices) -> torch.Tensor:
        """The changed score, in the score's dtype."""


@dataclass(frozen=True)
class Rules(Rule):
    """The conjunction of all `parts`."""

    parts: tuple[Rule, ...]

    def local(self, batch: slice, heads: slice) -> Rule:
        return Rules(tuple(part.local(batch, heads) for part in self.parts))


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the key at its place and those before."""

    def sees(self, indices: ScoreIndices) -> torch.Tensor:
        return indices.key <= indices.query

    def sees_blocks(self, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        return blocks.first_key <= blocks.last_query, blocks.last_key <= blocks.first_query


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees the keys less than `size` positions away, on both sides; with Causal the last `size`."""

    size: int

    def sees(self, indices: ScoreIndices) -> torch.Tensor:
        return (indices.query - indices.key < self.size) & (indices.key - indices.query < self.size)

    def sees_blocks(self, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        some = (blocks.first_query - blocks.last_key < self.size) & (blocks.first_key - blocks.last_query < self.size)
        every = (blocks.last_query - blocks.first_key < self.size) & (blocks.last_key - blocks.first_query < self.size)
        return some, every


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """A query sees the keys of its own document. `ids` (B, L) or (L,), integers; there are as many keys as queries.

    Blocks are skipped where ids grow along a sequence, as in packed ones. What is derived from ids is kept by this
    object: make one for all layers, and write no more to ids.
    """

    ids: torch.Tensor

    def sees(self, indices: ScoreIndices) -> torch.Tensor:
        ids = self.ids
        if ids.dim() == 1:
            return ids[indices.query] == ids[indices.key]
        return ids[indices.batch, indices.query] == ids[indices.batch, indices.key]

    def sees_blocks(self, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = self._ends(blocks.first_query[:, 0], blocks.last_query[:, 0])
        low, high = low.unsqueeze(-1), high.unsqueeze(-1)
        key_low, key_high = self._ends(blocks.first_key[0], blocks.last_key[0])
        key_low, key_high = key_low.unsqueeze(-2), key_high.unsqueeze(-2)
        every = (low == high) & (key_low == key_high) & (low == key_low)
        return (low <= key_high) & (key_low <= high), every

    def local(self, batch: slice, heads: slice) -> Rule:
        return self if self.ids.dim() == 1 or _is_all(batch, self.ids) else Documents(self.ids[batch])

    def _ends(self, first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and the highest id of each block, (..., num_blocks)."""
        within = torch.arange(BLOCK_SIZE, device=first.device)
        ids = self.ids[..., torch.minimum(first[:, None] + within, last[:, None])]
        return ids.amin(-1), ids.amax(-1)


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query sees the first `lengths` keys, and from there on those up to its place. `lengths` (B,), integers."""

    lengths: torch.Tensor

    def sees(self, indices: ScoreIndices) -> torch.Tensor:
        return (indices.key <= indices.query) | (indices.key < self.lengths[indices.batch])

    def sees_blocks(self, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = self.lengths[:, None, None]
        some = (blocks.first_key <= blocks.last_query) | (blocks.first_key < lengths)
        return some, (blocks.last_key <= blocks.first_query) | (blocks.last_key < lengths)

    def local(self, batch: slice, heads: slice) -> Rule:
        return self if _is_all(batch, self.lengths) else Prefix(self.lengths[batch])


@dataclass(frozen=True)
class SoftCap(ScoreChange):
    """A score x becomes cap tanh(x / cap)."""

    cap: float

    def changed(self, score: torch.Tensor, indices: ScoreIndices) -> torch.Tensor:
        return self.cap * torch.tanh(score / self.cap)


@dataclass(frozen=True, eq=False)
class Alibi(ScoreChange):
    """A head's slope, times how far the key is from the query, is taken off. `slopes` (H,), without a gradient."""

    slopes: torch.Tensor

    def changed(self, score: torch.Tensor, indices: ScoreIndices) -> torch.Tensor:
        distance = (indices.query - indices.key).abs()
        return score - (self.slopes.detach()[indices.head] * distance).to(score.dtype)

    def local(self, batch: slice, heads: slice) -> Rule:
        return self if _is_all(heads, self.slopes) else Alibi(self.slopes[heads])


def _is_all(part: slice, tensor: torch.Tensor) -> bool:
    return (part.start, part.stop) == (0, len(tensor))


BLOCK_SIZE = 128
"""The number of queries, and of keys, that are taken or skipped together."""


def parts_of(rule: Rule | None) -> tuple[Rule, ...]:
    """Masks and changes one by one, in the order written."""
    if rule is None:
        return ()
    return rule.parts if isinstance(rule, Rules) else (rule,)


def masks_of(rule: Rule | None) -> tuple[Mask, ...]:
    return tuple(part for part in parts_of(rule) if isinstance(part, Mask))


def changes_of(rule: Rule | None) -> tuple[ScoreChange, ...]:
    return tuple(part for part in parts_of(rule) if isinstance(part, ScoreChange))


def seen(rule: Rule | None, indices: ScoreIndices) -> torch.Tensor | None:
    """Marks the keys that are seen, by all masks; None where there is none."""
    result: torch.Tensor | None = None
    for mask in masks_of(rule):
        mask_seen = mask.sees(indices)
        result = mask_seen if result is None else result & mask_seen
    return result


def changed(rule: Rule | None, score: torch.Tensor, indices: ScoreIndices) -> torch.Tensor:
    """The score after all changes."""
    for change in changes_of(rule):
        score = change.changed(score, indices)
    return score


def window_of(rule: Rule | None) -> tuple[int, int] | None:
    """The number of keys before and behind its own position that a query sees, -1 for all; None where more than that is
    asked."""
    before = behind = -1
    for part in parts_of(rule):
        if isinstance(part, Causal):
            behind = 0
        elif isinstance(part, SlidingWindow):
            before = part.size - 1 if before < 0 else min(before, part.size - 1)
            behind = part.size - 1 if behind < 0 else min(behind, part.size - 1)
        else:
            return None
    return before, behind


def name_of(rule: Rule | None) -> str:
    """The kind of a rule: alike for rules that one compiled kernel serves."""
    names = [
        type(part).__name__ + "".join(f" {getattr(part, number)}" for number in _NUMBERS if hasattr(part, number))
        for part in parts_of(rule)
    ]
    return " & ".join(names) or "everything"


_NUMBERS = ("size", "cap")
