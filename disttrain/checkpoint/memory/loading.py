"""Loading from the memory of nodes: which saves are whole among them, and their files, each from a node that has it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.loading.fits import LoadReport, Rules
from disttrain.checkpoint.loading.load import load_source, open_save
from disttrain.checkpoint.memory.exchange import Address, FileServer, remote_file
from disttrain.checkpoint.memory.peer_memory import NodeMemory
from disttrain.checkpoint.memory.replica_placement import CompleteSave, Holding, complete_saves, nodes_of
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.checkpoint.storage.base import LocalStorage, ReadableFile
from disttrain.errors import CheckpointCorruptError


@dataclass(frozen=True)
class _Replicas:
    """The copies of all nodes, as this rank reaches them; `speaker` speaks for its own node."""

    memory: NodeMemory
    addresses: Mapping[int, Address]
    rank: int
    speaker: int


class ReplicatedSave:
    """A save that is whole in memory; satisfies `Readable`. What cannot be read counts as damaged: there are copies."""

    def __init__(self, save: CompleteSave, replicas: _Replicas) -> None:
        self._save = save
        self._replicas = replicas
        self._damaged: list[tuple[str, int]] = []

    @property
    def step(self) -> int:
        return self._save.name.step

    def open(self) -> Source:
        return open_save(self, self._replicas.memory.root / self._save.name.folder)

    def leaves_out_damaged(self, consensus: Consensus) -> bool:
        """Do without the copies that any rank has found to be damaged. Returns whether others can take their place.

        Collective, after a load that failed.
        """

        def union(rows: list[list[list[Any]]]) -> list[list[Any]]:
            return [copy for row in rows for copy in row]

        damaged = consensus.agree(lambda: [list(copy) for copy in self._damaged], union)
        remaining = self._save.without(damaged)
        self._save = remaining or self._save
        self._damaged.clear()
        return bool(damaged) and remaining is not None

    def go_on_from(self) -> None:
        """Notes that this save was loaded."""
        if self._replicas.rank == self._replicas.speaker:
            with suppress(OSError):  # other nodes may keep it
                self._replicas.memory.go_on_from(self._save.name)

    def names(self, path: Path) -> list[str]:
        return sorted(self._save.holders)

    @contextmanager
    def open_file(self, path: Path) -> Iterator[ReadableFile]:
        name, replicas, holders = path.name, self._replicas, self._save.holders[path.name]
        # Ranks that want the same file ask different nodes for it.
        holder = replicas.speaker if replicas.speaker in holders else holders[replicas.rank % len(holders)]
        try:
            with self._opened(name, holder) as file:
                yield file
        except CheckpointCorruptError:
            self._damaged.append((name, holder))
            raise
        except OSError as error:
            self._damaged.append((name, holder))
            problem = f"{name} of {self._save.name.folder} cannot be read from memory: {error}."
            raise CheckpointCorruptError("load", problem, "Load it from the disk.") from error

    def _opened(self, name: str, holder: int) -> AbstractContextManager[ReadableFile]:
        folder, replicas = self._save.name.folder, self._replicas
        if holder == replicas.speaker:
            return LocalStorage().open_file(replicas.memory.path_of(folder, name))
        return remote_file(replicas.addresses[holder], folder, name)


def load_replica(consensus: Consensus, state: dict[str, Any], save: ReplicatedSave, rules: Rules) -> LoadReport | None:
    """`load` from memory; None when no copies are left that are not damaged. Collective."""
    while True:
        try:
            report = load_source(consensus, state, save.open, rules)
        except CheckpointCorruptError as error:
            warnings.warn(f"a copy in memory was of no use: {error}", RuntimeWarning, stacklevel=3)
            if not save.leaves_out_damaged(consensus):
                return None
        else:
            save.go_on_from()
            return report


@contextmanager
def replicated_saves(consensus: Consensus, memory: NodeMemory | None) -> Iterator[list[ReplicatedSave]]:
    """The saves that are whole in memory, newest first, to be read within the block; none without `memory`.

    Collective. Nodes serve their files to each other for as long as the block runs.
    """
    with ExitStack() as stack:
        yield [] if memory is None else _find_saves(consensus, memory, stack)


def _find_saves(consensus: Consensus, memory: NodeMemory, stack: ExitStack) -> list[ReplicatedSave]:
    def first_ranks(sizes: list[int]) -> list[int]:
        return [ranks.start for ranks in nodes_of(sizes)]

    speakers = consensus.agree(lambda: memory.node_size(consensus.size), first_ranks)
    speaker = max(rank for rank in speakers if rank <= consensus.rank)

    def look() -> list[Any]:
        if consensus.rank != speaker:
            return [None, []]
        try:
            holdings = memory.holdings()
            if len(speakers) == 1:
                return [None, [holding.to_plain() for holding in holdings]]
            server = FileServer(memory, None if consensus.world is None else consensus.world.store)
        except OSError:  # this node's copies cannot be read; other nodes may have them, and the disk has
            return [None, []]
        stack.callback(server.close)
        return [list(server.address), [holding.to_plain() for holding in holdings]]

    def decide(rows: list[list[Any]]) -> list[Any]:
        holdings = {
            rank: [Holding.from_plain(row) for row in node_holdings] for rank, (_, node_holdings) in enumerate(rows)
        }
        return [[address for address, _ in rows], [save.to_plain() for save in complete_saves(holdings)]]

    addresses, saves = consensus.agree(look, decide)
    address_of = {rank: Address(*address) for rank, address in enumerate(addresses) if address is not None}
    replicas = _Replicas(memory, address_of, consensus.rank, speaker)
    return [ReplicatedSave(CompleteSave.from_plain(row), replicas) for row in saves]
