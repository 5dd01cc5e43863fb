"""Ranks in order, as a rule where there is one: a row of a mesh of 100,000 ranks is a first rank and some steps.

The rule is the layout of a strided array: nested loops, each of a size and a stride. A sequence has one such form at
most, since loops that can be joined are joined; so equal sequences have equal forms, whoever made them. Ranks without a
rule are kept as a list.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

Loop = tuple[int, int]
"""The number of steps, and the distance of each."""


class Ranks(Sequence[int]):
    """Ranks in order, immutable. Equal to `Ranks` of the same sequence only; `listed` is a tuple.

    Made by `Ranks.of` of any integers, or by `Ranks.grid` of a rule. All but iterating, `listed`, and what has no rule
    takes as long for a million of them as for two.
    """

    __slots__ = ("__dict__", "_first", "_listed", "_loops")

    def __init__(self, first: int, loops: tuple[Loop, ...] | None, listed: tuple[int, ...] = ()) -> None:
        """Not to be called by others: `of` and `grid` bring ranks into their one form."""
        self._first, self._loops, self._listed = first, loops, listed

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        """These ranks, by a rule if they have one. Raises TypeError for what is no integer."""
        if isinstance(ranks, Ranks):
            return ranks
        if isinstance(ranks, range):
            return cls.grid(ranks.start, [(len(ranks), ranks.step)])
        listed = tuple(map(operator.index, ranks))
        made = cls.grid(listed[0], _loops_of(listed)) if listed else None
        return made if made is not None and made._is_like(listed) else cls(0, None, listed)

    @classmethod
    def grid(cls, first: int, loops: Iterable[Loop]) -> Ranks:
        """The ranks that nested loops come to, the last of them innermost."""
        joined = joined_loops(loops)
        if math.prod(size for size, _ in joined) and _is_nested(joined):
            return cls(first, joined)
        return cls(0, None, tuple(_expanded(first, joined)))

    @property
    def loops(self) -> tuple[Loop, ...] | None:
        """The loops, outermost first; None where there is no rule. No two of them could be one."""
        return self._loops

    @property
    def listed(self) -> tuple[int, ...]:
        """All of them, made anew where there is a rule: for what is for people, and for torch."""
        return self._listed if self._loops is None else tuple(_expanded(self._first, self._loops))

    @property
    def repeats(self) -> bool:
        """True if a rank occurs twice."""
        return self._loops is None and len(self._positions) < len(self._listed)

    @property
    def ascends(self) -> bool:
        """True where they are known to be in ascending order: they have a rule, with each loop's steps upward."""
        strides = [stride for _, stride in self._loops or ()]
        return self._loops is not None and all(stride > 0 for stride in strides) and strides == sorted(strides)[::-1]

    @cached_property
    def lowest(self) -> int:
        """The lowest rank; there must be one."""
        if self._loops is None:
            return min(self._listed)
        return self._first + sum((size - 1) * stride for size, stride in self._loops if stride < 0)

    @cached_property
    def highest(self) -> int:
        """The highest rank; there must be one."""
        if self._loops is None:
            return max(self._listed)
        return self._first + sum((size - 1) * stride for size, stride in self._loops if stride > 0)

    def position(self, rank: Any) -> int | None:
        """The place of `rank`; None where it is not among them, or no integer."""
        try:
            rank = operator.index(rank)
        except TypeError:
            return None
        if self._loops is None:
            return self._positions.get(rank)
        distance, position = rank - self.lowest, 0
        for size, stride, weight in self._by_stride:
            steps = min(distance // abs(stride), size - 1)
            distance -= steps * abs(stride)
            position += weight * (steps if stride > 0 else size - 1 - steps)
        return position if distance == 0 and rank >= self.lowest else None

    def positions(self, members: Ranks) -> Ranks | None:
        """The position of each of `members`; None if one is not among them."""
        if self._loops is not None and members._loops is not None and len(self._loops) == 1:
            stride = self._loops[0][1]
            ends = self.position(members[0]), self.position(members.lowest), self.position(members.highest)
            if None not in ends and not any(step % stride for _, step in members._loops):
                return Ranks.grid(ends[0] or 0, [(size, step // stride) for size, step in members._loops])
        positions = [self.position(rank) for rank in members]
        return None if None in positions else Ranks.of(position for position in positions if position is not None)

    def at(self, positions: Ranks) -> Ranks:
        """The ranks at these positions."""
        if self._loops is not None and positions._loops is not None and len(self._loops) == 1:
            stride = self._loops[0][1]
            return Ranks.grid(self[positions[0]], [(size, step * stride) for size, step in positions._loops])
        ranks: Sequence[int] = self.listed
        return Ranks.of([ranks[position] for position in positions])

    def plain(self) -> list[Any]:
        """Numbers in lists, to be sent or to be written: `from_plain` makes the same ranks of them."""
        return [*self._listed] if self._loops is None else [self._first, [*map(list, self._loops)]]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Ranks:
        """The ranks of which `plain` was made."""
        if len(plain) == 2 and isinstance(plain[1], list | tuple):
            return cls.grid(plain[0], [(size, stride) for size, stride in plain[1]])
        return cls.of(plain)

    @cached_property
    def text(self) -> str:
        """Short: `0-7`, `0,2,4,6`, or `0,8,16,24,…,1016 (128 ranks)`."""
        if len(self) > 2 and self._loops is not None and [stride for _, stride in self._loops] == [1]:
            return f"{self._first}-{self.highest}"
        if len(self) > 8:
            return f"{','.join(map(str, self[:4]))},…,{self[-1]} ({len(self)} ranks)"
        return ",".join(map(str, self))

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self._listed)}

    @cached_property
    def _by_stride(self) -> list[tuple[int, int, int]]:
        """Size, stride, and the positions that a step goes on, of each loop, the widest first."""
        assert self._loops is not None
        weighted, weight = [], 1
        for size, stride in reversed(self._loops):
            weighted.append((size, stride, weight))
            weight *= size
        return sorted(weighted, key=lambda loop: -abs(loop[1]))

    @cached_property
    def _hash(self) -> int:
        return hash((self._first, self._loops, self._listed))

    @cached_property
    def _length(self) -> int:
        return len(self._listed) if self._loops is None else math.prod(size for size, _ in self._loops)

    def _is_like(self, listed: tuple[int, ...]) -> bool:
        return self._loops is not None and self._length == len(listed) and self.listed == listed

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self.listed)

    def __contains__(self, rank: object) -> bool:
        return self.position(rank) is not None

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Ranks: ...

    def __getitem__(self, index: int | slice) -> int | Ranks:
        if isinstance(index, slice):
            positions = range(self._length)[index]
            if self._loops is not None and len(self._loops) == 1 and positions:
                stride = self._loops[0][1]
                return Ranks.grid(self[positions[0]], [(len(positions), stride * positions.step)])
            return Ranks.of([self[position] for position in positions])
        if self._loops is None:
            return self._listed[index]
        position = range(self._length)[index]
        rank = self._first
        for size, stride in reversed(self._loops):
            position, step = divmod(position, size)
            rank += step * stride
        return rank

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Ranks):
            return NotImplemented
        return (self._first, self._loops, self._listed) == (other._first, other._loops, other._listed)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Ranks({self.text})"


class Positions(Mapping[int, int]):
    """The position of each of some ranks: a dict for readers, which takes no memory for each rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __getitem__(self, rank: int) -> int:
        position = self._ranks.position(rank)
        if position is None:
            raise KeyError(rank)
        return position

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


def cut_loops(loops: Sequence[Loop], shape: Sequence[int]) -> list[list[Loop]] | None:
    """The loops of each axis of a grid of `shape`, whose ranks in row-major order `loops` come to; None where an axis
    begins or ends within a step of a loop."""
    axes: list[list[Loop]] = []
    inner = [*loops]
    for axis_size in reversed(shape):
        axis: list[Loop] = []
        missing = axis_size
        while missing > 1:
            size, stride = inner.pop()
            taken = math.gcd(size, missing)
            if taken not in (size, missing):
                return None
            axis.insert(0, (taken, stride))
            missing //= taken
            if taken < size:
                inner.append((size // taken, stride * taken))
        axes.insert(0, axis)
    return axes


def _loops_of(listed: Sequence[int]) -> list[Loop]:
    """The loops that the beginnings of `listed` are like, if it has any; whether all is like them is to be seen."""
    loops: list[Loop] = []
    step = 1
    while step < len(listed):
        stride = listed[step] - listed[0]
        size = 2
        while size * step < len(listed) and listed[size * step] - listed[(size - 1) * step] == stride:
            size += 1
        loops.insert(0, (size, stride))
        step *= size
    return loops


def joined_loops(loops: Iterable[Loop]) -> tuple[Loop, ...]:
    """The same loops, where two that are one after the other can be one, or one has one step, with fewer."""
    joined: list[Loop] = []
    for size, stride in loops:
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return tuple(joined)


def _is_nested(loops: Sequence[Loop]) -> bool:
    """True if each loop's step goes beyond all that the loops of smaller steps come to: so no rank repeats."""
    reach = 0
    for size, stride in sorted(loops, key=lambda loop: abs(loop[1])):
        if abs(stride) <= reach:
            return False
        reach += (size - 1) * abs(stride)
    return True


def _expanded(first: int, loops: Sequence[Loop]) -> Iterable[int]:
    if not loops:
        return (first,)
    if any(size == 0 for size, _ in loops):
        return ()
    *outer, (size, stride) = loops
    inner = [
        range(start, start + size * stride, stride) if stride else [start] * size for start in _expanded(first, outer)
    ]
    return inner[0] if len(inner) == 1 else itertools.chain.from_iterable(inner)
