"""Values that the dumps of a job have in common, each kept once. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from disttrain.flight_recorder.dumps.dump import packed
from disttrain.flight_recorder.dumps.reading.checked_values import as_int, as_ints, as_text, more_of_site
from disttrain.flight_recorder.record.record import CallSite, Frame, GroupProgress, Stack
from disttrain.ranks import Ranks

T = TypeVar("T")


@dataclass
class Shared:
    """The values that were read of the dumps of one job, by the bytes that encode them."""

    stacks: dict[bytes, Stack] = field(default_factory=dict)
    sites: dict[tuple[bytes, int, int], CallSite] = field(default_factory=dict)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    ranks_by_rule: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    encoded_sites: dict[tuple[bytes, int, int], CallSite] = field(default_factory=dict)
    items: dict[bytes, GroupProgress | Stack] = field(default_factory=dict)
    columns: dict[tuple[str, int], array[int]] = field(default_factory=dict)
    lists: dict[tuple[int, ...], tuple[Any, ...]] = field(default_factory=dict)

    def site(
        self,
        group: tuple[str, tuple[int, ...], str],
        called: Sequence[Any],
        stack: Stack,
        more: Sequence[Any],
    ) -> CallSite:
        """The call site with these values. Raises ValueError, TypeError for one that cannot be.

        Args: group  its name, ranks and axis;  called  operation, shapes of inputs and outputs, dtypes and peer, as
              files have them;  more  what only later versions have.
        """
        name, ranks, axis_name = group
        operation, inputs, outputs, dtypes, peer_rank = called
        # Without the numbers of ranks and stack, which differ between files.
        key = (packed([name, axis_name, *called, *more]), id(ranks), id(stack))
        site = self.sites.get(key)
        if site is None:
            shapes = tuple(map(as_ints, inputs)), tuple(map(as_ints, outputs))
            peer = None if peer_rank is None else as_int(peer_rank)
            fields = name, ranks, operation, *shapes, tuple(map(as_text, dtypes)), peer, stack
            site = self.sites[key] = CallSite(*fields, axis_name, *more_of_site(more))
        return site

    def stack(self, frames: Sequence[Any]) -> Stack:
        """The stack of these frames. Raises ValueError, TypeError for one that cannot be."""
        key = packed(frames)
        stack = self.stacks.get(key)
        if stack is None:
            frame_of = (Frame(as_text(file), as_int(line), as_text(name)) for file, line, name in frames)
            stack = self.stacks[key] = tuple(frame_of)
        return stack

    def listed_ranks(self, ranks: Any) -> tuple[int, ...]:
        """The ranks that are listed. Raises TypeError."""
        listed = as_ints(ranks)
        return self.ranks.setdefault(listed, listed)

    def ranks_of(self, plain: Sequence[Any]) -> tuple[int, ...]:
        """The ranks that are listed or told by a rule, as by `Ranks.plain`. Raises ValueError, TypeError."""
        key = packed(plain)
        ranks = self.ranks_by_rule.get(key)
        if ranks is None:
            ranks = self.ranks_by_rule[key] = self.listed_ranks(list(Ranks.from_plain(plain).listed))
        return ranks

    def column(self, column: array[int]) -> array[int]:
        """The same numbers: those of another rank, if it has them."""
        shared = self.columns.setdefault((column.typecode, hash(column.tobytes())), column)
        return shared if shared == column else column

    def listed(self, values: Sequence[T]) -> tuple[T, ...]:
        """The same objects, in the tuple of another rank, if it has one. The objects must be kept by others."""
        return self.lists.setdefault(tuple(map(id, values)), tuple(values))
