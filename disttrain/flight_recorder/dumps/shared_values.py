"""Values that the dumps of a job have in common, each kept once. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from disttrain.flight_recorder.record.record import CallSite, GroupProgress, Stack

T = TypeVar("T")


@dataclass
class Shared:
    """What has been read of the dumps of one job, by the bytes that encode it."""

    stacks: dict[bytes, Stack] = field(default_factory=dict)
    sites: dict[tuple[bytes, int, int], CallSite] = field(default_factory=dict)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    encoded_sites: dict[tuple[bytes, int, int], CallSite] = field(default_factory=dict)
    items: dict[bytes, GroupProgress | Stack] = field(default_factory=dict)
    columns: dict[tuple[str, int], array[int]] = field(default_factory=dict)
    lists: dict[tuple[int, ...], tuple[Any, ...]] = field(default_factory=dict)

    def column(self, column: array[int]) -> array[int]:
        """The same numbers: those of another rank, if it has them."""
        known = self.columns.setdefault((column.typecode, hash(column.tobytes())), column)
        return known if known == column else column

    def listed(self, values: Sequence[T]) -> tuple[T, ...]:
        """The same objects, in the tuple of another rank, if it has one. The objects must be kept by others."""
        return self.lists.setdefault(tuple(map(id, values)), tuple(values))
