"""Whose copies lie on which node, and which saves are whole among them: pure functions. Torch-free.

Each rank's file is kept by its own node and by the next one, as in Gemini (Wang et al., SOSP 2023), so that any one
node may be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Holdings = Mapping[str, int]
"""Names and bytes of files."""


def keeper_of(rank: int, world_size: int, ranks_per_node: int) -> int | None:
    """The rank on another node that keeps this rank's copies; None where there is one node only."""
    num_nodes = -(-world_size // ranks_per_node)
    if num_nodes == 1:
        return None
    node, place = divmod(rank, ranks_per_node)
    first = (node + 1) % num_nodes * ranks_per_node
    num_there = min(ranks_per_node, world_size - first)
    return first + place % num_there


@dataclass(frozen=True)
class Holding:
    """What one node has of one save; `needed`: all of the save's files, where the node has its manifest."""

    step: int
    save_id: str
    has: Holdings
    needed: Holdings | None

    def to_plain(self) -> list[Any]:
        return [self.step, self.save_id, dict(self.has), None if self.needed is None else dict(self.needed)]


@dataclass(frozen=True)
class WholeSave:
    """A save of which every file is on some node; `holders`: by file, the ranks that speak for those nodes."""

    step: int
    save_id: str
    holders: Mapping[str, Sequence[int]]

    def to_plain(self) -> list[Any]:
        return [self.step, self.save_id, dict(self.holders)]


def whole_saves(found: Mapping[int, Sequence[Holding]]) -> list[WholeSave]:
    """The saves that are whole among the nodes, newest first; `found`: by the rank that speaks for a node."""
    needed = {
        (save.step, save.save_id): save.needed for saves in found.values() for save in saves if save.needed is not None
    }
    whole = []
    for (step, save_id), files in needed.items():
        on = {rank: save.has for rank, saves in found.items() for save in saves if save.save_id == save_id}
        holders = {
            name: [rank for rank, has in on.items() if has.get(name) == num_bytes] for name, num_bytes in files.items()
        }
        if all(holders.values()):
            whole.append(WholeSave(step, save_id, holders))
    return sorted(whole, key=lambda save: (save.step, save.save_id), reverse=True)
