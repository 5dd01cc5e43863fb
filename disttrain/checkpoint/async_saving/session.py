"""A sequence of asynchronous saves by the same writers: decisions at the store, and the results of each save.

Ranks don't wait for each other when they save. Some questions could have different answers on different ranks (is a
writer busy, has a save failed?). For these, the first rank that comes to a call writes its answer to the store, and all
others use it.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import xxhash

from disttrain.checkpoint.async_saving.job import BYTES, COMMITTED, DIFFER, DROPPED, FAIL, FAILED, KEPT, SAVE, Job
from disttrain.checkpoint.async_saving.pending import PendingSave
from disttrain.checkpoint.async_saving.shared_memory import SharedMemory
from disttrain.checkpoint.async_saving.writer_link import WriterLink
from disttrain.checkpoint.async_saving.writer_process import BEGUN, NOT_BEGUN, fate_key
from disttrain.checkpoint.memory.peer_memory import NodeMemory
from disttrain.checkpoint.saving.assembly import speak_for
from disttrain.checkpoint.saving.consensus import Party
from disttrain.errors import CheckpointError, DisttrainError
from disttrain.store import FileStore, PrefixStore, Store
from disttrain.store.connection.handover import store_to_plain

_TURNS_KEPT = 64
_RESTART = "The next save starts a new writer; look in the log for what ended this one."


class Turn(NamedTuple):
    """The decision for one call, the same on all ranks: raise for a failed save (problem, remedy), skip, drop a save,
    plan anew."""

    failure: Sequence[str] | None = None
    skips: bool = False
    drops: int | None = None
    plans: bool = False


class Session:
    """This rank's link to the writers; `token` is the same on all ranks, `memory` is where copies are kept."""

    def __init__(self, party: Party | None, token: str, memory: NodeMemory | None = None) -> None:
        self.token = token
        self.rank, self.size = (0, 1) if party is None else party[:2]
        self._ranks = (0,) if party is None else party.ranks
        self._own_store: Store | None = None
        if party is None:
            folder = tempfile.mkdtemp(prefix="disttrain-save-")
            path = f"{folder}/store"
            self._own_store = FileStore(path)
            weakref.finalize(self, _remove, self._own_store, path, folder)
        name = f"checkpoint/async/{token}"
        whole = self._own_store if party is None else party.store
        assert whole is not None
        self._store = PrefixStore(name, whole)
        plain_memory = None if memory is None else memory.to_plain()
        ranks = None if self._ranks == tuple(range(self.size)) else list(self._ranks)
        self._config = [self.rank, self.size, name, store_to_plain(whole), plain_memory, ranks]
        self._link: WriterLink | None = None
        self._death = ""
        self._pending: dict[int, PendingSave] = {}

    def save_id(self, number: int) -> str:
        return xxhash.xxh3_128_hexdigest(f"{self.token}/{number}".encode())

    def agreed(self, number: int, proposal: Turn) -> Turn:
        """The proposal of the first rank that came to this call."""
        if self.size == 1:
            return proposal
        agreed = self._store.compare_set(f"turns/{number}", b"", msgpack.packb(proposal))
        if self.rank == 0:
            self._store.delete_key(f"turns/{number - _TURNS_KEPT}")
        return Turn(*msgpack.unpackb(agreed))

    def gives_up(self, number: int) -> bool:
        """Gives up a save that has perhaps not begun, for a newer one; returns whether it is given up, the same on all
        ranks."""
        return self._store.compare_set(fate_key(number), b"", NOT_BEGUN) != BEGUN

    @property
    def writer_pid(self) -> int | None:
        return None if self._link is None else self._link.pid

    def add(self, pending: PendingSave) -> None:
        """Registers `pending`, which ends when its save has."""
        self._pending[pending.number] = pending

    def submit(self, job: Job, shared_memory: SharedMemory | None) -> None:
        """Have what is in the shared memory written."""
        link = self._linked(job.number)
        if link is not None:
            if shared_memory is not None:
                link.show(job.shared_memory, shared_memory)
            link.say([SAVE, job.to_plain()])

    def refuse(self, number: int, error: DisttrainError) -> None:
        """Tells the writers that this rank has no part to save: the save fails, on all ranks."""
        link = self._linked(number)
        if link is not None:
            link.say([FAIL, number, error.problem, error.remedy])

    def end(self) -> None:
        """Let the writer end when it has written what it has."""
        if self._link is not None:
            self._link.end()

    def join(self) -> None:
        """Wait for that."""
        if self._link is not None:
            self._link.join()

    def _linked(self, number: int) -> WriterLink | None:
        """The writer, started if need be; None when it is dead, and then the save has failed."""
        if self._link is None and not self._death:
            try:
                self._link = WriterLink(self._config, self._hear, self._died)
            except CheckpointError as error:
                self._died(error.problem.rstrip("."))
        if self._death:
            self._end(number, CheckpointError("async_save", self._death, _RESTART, rank=self._own_rank))
            return None
        return self._link

    @property
    def _own_rank(self) -> int | None:
        return self._ranks[self.rank] if self.size > 1 else None

    def _hear(self, message: list[Any]) -> None:
        kind, number, *rest = message
        pending = self._pending.get(number)
        if pending is None:
            return
        if kind == BYTES:
            pending.num_bytes = rest[0]
        elif kind == KEPT:
            pending.memory_problem = rest[0]
        elif kind == DIFFER:
            pending.differing = rest[0]
        elif kind == COMMITTED:
            self._end(number, pending.path)
        elif kind == DROPPED:
            pending.drop()
            self._end(number, None)
        elif kind == FAILED:
            self._end(number, CheckpointError("async_save", *rest, rank=self._own_rank))

    def _end(self, number: int, outcome: Path | CheckpointError | None) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.end(outcome)

    def _died(self, sentence: str) -> None:
        where = f"on rank {self._ranks[self.rank]}: " if self.size > 1 else ""
        self._death = f"{where}{sentence}."
        if self.size > 1:
            try:
                speak_for(self.rank, self._store, f"{sentence}.", _RESTART)
            except DisttrainError:  # the store is gone: the others notice that themselves
                pass
        for number in list(self._pending):
            self._end(number, CheckpointError("async_save", self._death, _RESTART, rank=self._own_rank))


def _remove(store: Store, path: str, folder: str) -> None:
    store.close()
    Path(path).unlink(missing_ok=True)
    Path(folder).rmdir()
