"""The ranks of the default world, or of a group, as an assembly at the world's store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from disttrain.checkpoint.saving.assembly import Assembly, Codec
from disttrain.process_group import ProcessGroup, World, current_world, is_initialized
from disttrain.process_group.calls.packing import pack, unpack
from disttrain.process_group.watching.comparing import ask_members
from disttrain.process_group.watching.departures import members_left
from disttrain.store import PrefixStore, Store
from disttrain.store.slices import SLICE_S

Part = TypeVar("Part")
_SILENT_AFTER, _ANSWER_S = 4, 1.5
"""A rank is gone after this number of successive questions without an answer, each with this timeout."""

_FIRST_ASKED_AFTER_S, _ASKED_EVERY_S = 0.5, 2.0
"""Begin and period of the questions. A rank that dies just after an answer is known to be gone 9 s later, on a machine
that is not busy."""


class Party(NamedTuple):
    """Members that save or load together: this one's number among them, how many they are, their store, their global
    ranks."""

    rank: int
    size: int
    store: Store
    ranks: tuple[int, ...]


class Consensus(Assembly):
    """The ranks that save or load together: the default world's, a `group`'s, or this process `alone`, as where there
    is no world. `party` is None for one process alone."""

    def __init__(self, operation: str, *, alone: bool = False, group: ProcessGroup | None = None) -> None:
        self.world: World | None = None if alone or not is_initialized() else current_world(operation)
        self.party = None if self.world is None else _party(self.world, group)
        self.is_whole = self.party is not None and group is None
        rank, size = (0, 1) if self.party is None else self.party[:2]
        store = None if self.party is None else PrefixStore("checkpoint", self.party.store)
        ranks = None if self.party is None else self.party.ranks
        super().__init__(operation, rank, size, store, Codec(pack, unpack), ranks)
        self._asks = rank in asking(size) and self.world is not None and self.world.witness is not None
        self._longest_slice_s = SLICE_S if self._asks else math.inf
        self._asks_at_s = 0.0

    def agree(self, work: Callable[[], Part], decide: Callable[[list[Part]], Any] | None = None) -> Any:
        self._asks_at_s = time.monotonic() + _FIRST_ASKED_AFTER_S
        return super().agree(work, decide)

    def find_gone(self, awaited: Callable[[], list[int]]) -> str:
        world, party = self.world, self.party
        if world is None or party is None or not self._asks:
            return ""
        left, asks_now = members_left(world.default_group), time.monotonic() >= self._asks_at_s
        if not (left or asks_now):
            return ""
        ranks = {party.ranks[member] for member in awaited()} - {world.rank}
        gone = sorted(ranks & set(left))
        if gone:
            return f"ranks {gone} have left the job."
        if not asks_now:
            return ""
        silent = ranks
        for _ in range(_SILENT_AFTER):
            silent = silent - set(ask_members(world.default_group, 0, tuple(silent), _ANSWER_S))
            if not silent:
                break
        self._asks_at_s = time.monotonic() + _ASKED_EVERY_S
        return f"ranks {sorted(silent)} do not answer any more." if silent else ""


def asking(size: int) -> set[int]:
    """The members of so many that ask whether others are alive: few, since all ranks read each question, and on
    several machines, since with the first member those beside it may have gone."""
    return {0, size // 2, size - 1}


def _party(world: World, group: ProcessGroup | None) -> Party:
    if group is None:
        return Party(world.rank, world.world_size, world.store, tuple(range(world.world_size)))
    store = PrefixStore(f"checkpoint-of/{group.group_name}", world.store)
    return Party(group.ranks.index(world.rank), len(group.ranks), store, group.ranks)
