"""Assigns each rank's copies to nodes, and finds the saves that are whole among them: pure functions. Torch-free.

Each rank's file is kept by its own node and by the next one, as in Gemini (Wang et al., SOSP 2023), so that any one
node may be lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from disttrain.errors import CheckpointError

Holdings = Mapping[str, int]
"""Names and bytes of files."""

_FOLDER = re.compile(r"step-(\d{8,})\.(\d{6,})\.([0-9a-f]{32})")


def nodes_of(sizes: Sequence[int]) -> list[range]:
    """The ranks of each node, which follow each other; `sizes`: how many its node has, as each rank knows it.

    The last node may have fewer. Raises CheckpointError when ranks of one node say different things.
    """
    nodes: list[range] = []
    first = 0
    while first < len(sizes):
        node = range(first, min(first + sizes[first], len(sizes)))
        for rank in node:
            if sizes[rank] != sizes[first]:
                raise CheckpointError(
                    "Checkpointer",
                    f"rank {first} counts {sizes[first]} ranks on its node, rank {rank} on the same one {sizes[rank]}.",
                    "Give PeerMemory(ranks_per_node) the number of each node, alike on all its ranks.",
                )
        nodes.append(node)
        first = node.stop
    return nodes


def replica_rank_of(rank: int, nodes: Sequence[range]) -> int | None:
    """The rank on another node that keeps this rank's copies; None where there is one node only."""
    if len(nodes) == 1:
        return None
    number = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    next_node = nodes[(number + 1) % len(nodes)]
    return next_node[(rank - nodes[number].start) % len(next_node)]


class ReplicaName(NamedTuple):
    """A save in memory; `order` grows from save to save, also when an earlier step is saved again."""

    step: int
    order: int
    save_id: str

    @property
    def folder(self) -> str:
        return f"step-{self.step:08d}.{self.order:06d}.{self.save_id}"

    @classmethod
    def of(cls, folder: str) -> ReplicaName | None:
        """Parses a folder's name; None for the name of something else."""
        match = _FOLDER.fullmatch(folder)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3])


@dataclass(frozen=True)
class Holding:
    """The files that one node has of one save; `needed`: all of the save's files, where the node has its manifest."""

    name: ReplicaName
    has: Holdings
    needed: Holdings | None

    def to_plain(self) -> list[Any]:
        return [list(self.name), dict(self.has), None if self.needed is None else dict(self.needed)]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Holding:
        name, has, needed = plain
        return cls(ReplicaName(*name), has, needed)


@dataclass(frozen=True)
class CompleteSave:
    """A save of which every file is on some node; `holders`: by file, the ranks that speak for those nodes."""

    name: ReplicaName
    holders: Mapping[str, Sequence[int]]

    def to_plain(self) -> list[Any]:
        return [list(self.name), dict(self.holders)]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> CompleteSave:
        name, holders = plain
        return cls(ReplicaName(*name), holders)

    def without(self, copies: Sequence[Sequence[Any]]) -> CompleteSave | None:
        """The same save without these copies, (file, rank); None when it is not whole then."""
        bad = {tuple(copy) for copy in copies}
        holders = {name: [rank for rank in ranks if (name, rank) not in bad] for name, ranks in self.holders.items()}
        return CompleteSave(self.name, holders) if all(holders.values()) else None


def complete_saves(holdings: Mapping[int, Sequence[Holding]]) -> list[CompleteSave]:
    """The saves that are whole among the nodes, newest first; `found`: by the rank that speaks for a node.

    A save of the same step or a later one that was made earlier is not among them: training has gone back since.
    """
    needed = {save.name: save.needed for saves in holdings.values() for save in saves if save.needed is not None}
    whole: list[CompleteSave] = []
    for name, files in sorted(needed.items(), key=lambda item: item[0].order, reverse=True):
        on = {rank: save.has for rank, saves in holdings.items() for save in saves if save.name == name}
        holders = {
            file: [rank for rank, has in on.items() if has.get(file) == num_bytes] for file, num_bytes in files.items()
        }
        if all(holders.values()) and (not whole or name.step < whole[-1].name.step):
            whole.append(CompleteSave(name, holders))
    return whole
