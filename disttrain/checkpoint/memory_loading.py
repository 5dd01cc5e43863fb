"""Loading from the memory of nodes: which saves are whole among them, and their files, each from a node that has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain.checkpoint.agreement import Council
from disttrain.checkpoint.exchange import Address, FileServer, remote_file
from disttrain.checkpoint.keepers import Holding, WholeSave, whole_saves
from disttrain.checkpoint.loading import Source, open_save
from disttrain.checkpoint.peer_memory import NodeMemory, kept_name
from disttrain.checkpoint.storage import LocalStorage, ReadableFile
from disttrain.errors import CheckpointCorruptError


@dataclass(frozen=True)
class _MemoryFiles:
    """One save's files; satisfies `Readable`. What cannot be read counts as damaged: there are other places."""

    memory: NodeMemory
    save: str
    holders: Mapping[str, Sequence[int]]
    addresses: Mapping[int, Address]
    rank: int
    speaker: int

    def names(self, path: Path) -> list[str]:
        return sorted(self.holders)

    @contextmanager
    def open_file(self, path: Path) -> Iterator[ReadableFile]:
        name = path.name
        try:
            with self._opened(name) as file:
                yield file
        except OSError as error:
            raise CheckpointCorruptError(
                "load", f"{name} of {self.save} cannot be read from memory: {error}.", "Load it from the disk."
            ) from error

    def _opened(self, name: str) -> AbstractContextManager[ReadableFile]:
        holders = self.holders[name]
        if self.speaker in holders:
            return LocalStorage().open_file(self.memory.path_of(self.save, name))
        # Ranks that want the same file ask different nodes for it.
        return remote_file(self.addresses[holders[self.rank % len(holders)]], self.save, name)


@dataclass(frozen=True)
class KeptSave:
    """A save that is whole in memory."""

    step: int
    files: _MemoryFiles

    def open(self) -> Source:
        return open_save(self.files, self.files.memory.root / self.files.save)


@contextmanager
def kept_saves(council: Council, memory: NodeMemory | None) -> Iterator[list[KeptSave]]:
    """The saves that are whole in memory, newest first, to be read within the block; none without `memory`.

    Collective. Nodes serve their files to each other for as long as the block runs.
    """
    with ExitStack() as stack:
        yield [] if memory is None else _found(council, memory, stack)


def _found(council: Council, memory: NodeMemory, stack: ExitStack) -> list[KeptSave]:
    node_size = memory.node_size(council.size)
    speaker = council.rank - council.rank % node_size

    def look() -> list[Any]:
        if council.rank != speaker:
            return [None, []]
        try:
            holdings = memory.holdings()
            if node_size >= council.size:
                return [None, [holding.to_plain() for holding in holdings]]
            server = FileServer(memory, None if council.world is None else council.world.store)
        except OSError:  # what this node has cannot be read: others may have it too, and so has the disk
            return [None, []]
        stack.callback(server.close)
        return [list(server.address), [holding.to_plain() for holding in holdings]]

    def decide(rows: list[list[Any]]) -> list[Any]:
        found = {rank: [Holding(*row) for row in held] for rank, (_, held) in enumerate(rows)}
        return [[address for address, _ in rows], [save.to_plain() for save in whole_saves(found)]]

    addresses, saves = council.agree(look, decide)
    known = {rank: Address(*address) for rank, address in enumerate(addresses) if address is not None}
    return [
        KeptSave(
            save.step,
            _MemoryFiles(
                memory, kept_name(f"step-{save.step:08d}", save.save_id), save.holders, known, council.rank, speaker
            ),
        )
        for save in (WholeSave(*row) for row in saves)
    ]
