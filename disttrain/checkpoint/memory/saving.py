"""A writer's part of keeping a save in memory: its file on its own node, and a copy on the next one.

A copy that cannot be kept is reported, and fails no save, since the disk has it. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack

from disttrain.checkpoint.format.image import Image, Written
from disttrain.checkpoint.format.manifest import file_name
from disttrain.checkpoint.memory.exchange import Address, FileServer, put_file
from disttrain.checkpoint.memory.peer_memory import NodeMemory
from disttrain.checkpoint.memory.replica_placement import ReplicaName, nodes_of, replica_rank_of
from disttrain.checkpoint.saving.commit import Contents, Target, files_about
from disttrain.store import Store


class Copies:
    """One rank's, of all saves of a session. Args: store  of the session, which its writers share."""

    def __init__(self, memory: NodeMemory, rank: int, size: int, store: Store) -> None:
        self._memory = memory
        self._rank = rank
        self._store = store
        self._node_size = memory.node_size(size)
        self._has_others = self._node_size < size
        self._order = 0
        self._replica_rank: int | None = None
        self._server: FileServer | None = None
        self._trouble = ""

    def make_ready(self) -> list[int]:
        """Make room, and be there for those whose copies this rank keeps; before the ranks meet. Returns: for
        `arranged`."""
        last = 0

        def make_room() -> None:
            nonlocal last
            last = self._memory.make_room()

        self._trouble = _attempt(make_room)
        if self._has_others and self._server is None:
            self._trouble = _attempt(self._serve) or self._trouble
        return [self._node_size, last]

    def begin(self, arrangement: list[Any]) -> None:
        """A save comes; by what `arranged` has found."""
        self._order, nodes = arrangement
        self._replica_rank = replica_rank_of(self._rank, [range(*node) for node in nodes])

    def write(self, target: Target, image: Image | None, data: memoryview) -> list[Any]:
        """Keep this rank's file, `data`. Returns: for `finish`."""
        if image is None:
            return [True, "", Written().to_plain()]
        file, written = file_name(self._rank), Written(image.saved_file())
        is_kept, problem = self._keep_twice(target, file, data, lambda: _look_through(image, file, data, written))
        return [is_kept, self._trouble or problem, written.to_plain()]

    def finish(self, target: Target, contents: Contents, rows: Sequence[list[Any]]) -> tuple[bool, str]:
        """Decides on rank 0, from what each rank has kept. Returns: whether the save is whole in memory; what has gone
        wrong."""
        problems = [f"on rank {rank}: {problem}" for rank, (_, problem, _) in enumerate(rows) if problem]
        is_whole = all(is_kept for is_kept, _, _ in rows)
        about = files_about(target.save_id, contents, [row for _, _, row in rows]) if is_whole else {}
        for name, parts in about.items():
            is_whole, problem = self._keep_twice(target, name, memoryview(b"".join(parts)), lambda: None)
            problems += [problem] if problem else []
            if not is_whole:
                break
        return is_whole, problems[0] if problems else ""

    def keep(self, target: Target) -> None:
        """Keeps the save, which is complete, until there is a newer one. What fails here is found at a load."""
        _attempt(lambda: self._memory.keep(self._name(target)))

    def _keep_twice(self, target: Target, file: str, data: memoryview, beside: Callable[[], None]) -> tuple[bool, str]:
        """Keep a file here and on the replica rank, and do `beside`. Returns: whether one has it; a problem."""
        save = self._name(target)
        with ThreadPoolExecutor(1) as sender:
            sent = sender.submit(_attempt, lambda: self._send(save, file, data))
            problem = _attempt(lambda: self._memory.write(save, file, [data]))
            beside()
            not_sent = sent.result()
        has_one = not problem or (self._replica_rank is not None and not not_sent)
        return has_one, problem or not_sent

    def _send(self, save: str, file: str, data: memoryview) -> None:
        if self._replica_rank is not None:
            # The ranks have met since it was written.
            key = _address_key(self._replica_rank)
            if not self._store.check([key]):
                raise ConnectionError(f"rank {self._replica_rank} takes no copies")
            put_file(Address(*msgpack.unpackb(self._store.get(key))), save, file, data)

    def _name(self, target: Target) -> str:
        """The save's folder in memory."""
        return ReplicaName(int(target.path.name.rpartition("-")[2]), self._order, target.save_id).folder

    def _serve(self) -> None:
        self._server = FileServer(self._memory, self._store)
        self._store.set(_address_key(self._rank), msgpack.packb(self._server.address))


def arranged(ready: Sequence[list[int]]) -> list[Any]:
    """Orders the save after all earlier ones, and lists the nodes, from what each rank has prepared. Raises
    CheckpointError."""
    sizes, lasts = zip(*ready, strict=True)
    return [1 + max(lasts), [[node.start, node.stop] for node in nodes_of(sizes)]]


def _address_key(rank: int) -> str:
    return f"memory/{rank}"


def _look_through(image: Image, file: str, data: memoryview, written: Written) -> None:
    """Enter all chunks in `written`."""
    for _ in image.parts(file, lambda number: image.extents[number].of(data), written):
        pass


def _attempt(act: Callable[[], None]) -> str:
    """Runs `act`. Returns its error in words, or ""."""
    try:
        act()
    except OSError as error:
        return f"{type(error).__name__}: {error}."
    return ""
