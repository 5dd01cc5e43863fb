"""The process that writes a rank's saves while training goes on, run by `python -m`.

It reads the data from memory that it shares with its training process, agrees with the other ranks' writers through the
store, and loads no torch. When its training process ends, it finishes the saves that it was given, if the other writers
do.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from disttrain._python.signals import ignore_all
from disttrain.checkpoint.async_saving.job import (
    BYTES,
    COMMITTED,
    DIFFER,
    DROPPED,
    END,
    FAIL,
    FAILED,
    KEPT,
    SHARED_MEMORY,
    Job,
)
from disttrain.checkpoint.async_saving.wire import Wire
from disttrain.checkpoint.format.image import Image, Written
from disttrain.checkpoint.format.manifest import file_name
from disttrain.checkpoint.memory.peer_memory import NodeMemory
from disttrain.checkpoint.memory.saving import Copies, arranged
from disttrain.checkpoint.saving.alike import Group, differing_groups, refuse_differing
from disttrain.checkpoint.saving.assembly import DEAD, Assembly, speak_for
from disttrain.checkpoint.saving.commit import check_names, check_target, commit, retire_old, temporary_folder
from disttrain.checkpoint.saving.copies_compared import Replicas, differing_copies
from disttrain.checkpoint.storage.base import Storage
from disttrain.checkpoint.storage.removal import remove_all
from disttrain.errors import CheckpointError, DisttrainError, StoreError
from disttrain.settings import CHECKPOINT_ORPHAN_TIMEOUT_S
from disttrain.store import PrefixStore, Store
from disttrain.store.connection.handover import store_from_plain

BEGUN, NOT_BEGUN = b"begun", b"dropped"
"""Decides whether a save begins or is given up for a newer one: the first to write this key."""

_TRAINER_DIED = "the training process ended before it had closed its Checkpointer."
_REPORT_EVERY_BYTES = 32 << 20
_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_OF_PROCESS = 1
_LOWEST_BEST_EFFORT = 2 << 13 | 7


def fate_key(number: int) -> str:
    return f"fate/{number}"


class Writer:
    """Serves one training process, until that says no more."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._jobs: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._shared_memories: dict[int, mmap.mmap] = {}
        self._storages: dict[str, Storage] = {}
        self._broken: DisttrainError | None = None
        first = wire.receive()
        if first is None:
            raise SystemExit(1)
        (rank, size, name, store, memory, ranks), _ = first
        self._rank = rank
        self._store: Store = PrefixStore(name, store_from_plain(store))
        self._assembly = Assembly("async_save", rank, size, self._store if size > 1 else None, ranks=ranks)
        self._copies: Copies | None = None
        if memory is not None:
            self._copies = Copies(NodeMemory.from_plain(memory), rank, size, self._store)

    def run(self) -> None:
        threading.Thread(target=self._receive, daemon=True).start()
        while (message := self._jobs.get()) is not None:
            if message[0] == END:
                return
            number = message[1] if message[0] == FAIL else message[1][0]
            try:
                if self._broken is not None:
                    raise self._broken
                self._save(message)
            except DisttrainError as error:
                self._say(FAILED, number, error.problem, error.remedy)
                self._broken = self._broken or self._checked(error)

        # The training process died. Writers of other ranks may have more saves, and wait for this one.
        if self._assembly.size > 1:
            try:
                speak_for(self._rank, self._store, _TRAINER_DIED, "See why in its log.")
            except DisttrainError:  # the store has gone, and with it the job
                pass

    def _checked(self, error: DisttrainError) -> DisttrainError | None:
        """The error, if there is no use in meeting the other writers any more: one of them is dead."""
        try:
            return error if self._store.check([DEAD]) else None
        except DisttrainError as gone:
            return gone

    def _receive(self) -> None:
        while (received := self._wire.receive()) is not None:
            message, descriptors = received
            if message[0] == SHARED_MEMORY:
                _, key, num_bytes = message
                self._shared_memories[key] = mmap.mmap(descriptors[0], num_bytes)
                os.close(descriptors[0])
            else:
                self._jobs.put(message)
        self._jobs.put(None)
        # If a training process died before it started its writer, no process can report that.
        self._assembly.hurry(CHECKPOINT_ORPHAN_TIMEOUT_S.read())

    def _say(self, *message: Any) -> None:
        try:
            self._wire.send(message)
        except OSError:  # the training process has ended; the save goes on
            pass

    def _save(self, message: list[Any]) -> None:
        if message[0] == FAIL:
            _, _, problem, remedy = message
            self._assembly.agree(lambda: _refuse(problem, remedy))
        job = Job.from_plain(message[1])
        name, arguments = job.storage
        with ExitStack() as stack:
            storage: Storage | None = None

            def prepare() -> list[Any]:
                nonlocal storage
                storage = self._storage(name, arguments)
                ready = [] if self._copies is None else self._copies.make_ready()
                values, copies = (
                    [[entry.number, entry.digest()] for entry in many] for many in (job.shared, job.copies)
                )
                return [job.digest, job.target.path.name, values, copies, ready]

            def begin(ballots: list[list[Any]]) -> tuple[Any, list[int], list[int]] | None:
                assert storage is not None
                digests, names, values, copies, ready = zip(*ballots, strict=True)
                check_names(names)
                _check_plans(digests)
                self._store.delete_key(fate_key(job.number - 8))
                if self._store.compare_set(fate_key(job.number), b"", BEGUN) != BEGUN:
                    return None
                arrangement = [] if self._copies is None else arranged(ready)
                stack.enter_context(temporary_folder(storage, job.target))
                return arrangement, differing_groups(values), differing_groups(copies)

            begun = self._assembly.agree(prepare, begin)
            if begun is None:
                self._say(DROPPED, job.number)
                return
            arrangement, values, copies = begun
            if values:
                self._compare_values([group for group in job.shared if group.number in values])
            if copies:
                self._compare_copies(job.number, [group for group in job.copies if group.number in copies])
            assert storage is not None
            if self._copies is not None:
                self._copies.begin(arrangement)
                self._keep(job, storage, self._copies)
            dying = self._write(job, storage)
        self._say(COMMITTED, job.number)
        remove_all(storage, dying)

    def _compare_values(self, groups: list[Group]) -> None:
        """Compares values that are packed differently; raises CheckpointError on all ranks if they differ."""

        def describe() -> dict[str, list[Any]]:
            return {name: value for group in groups for name, value in group.described().items()}

        self._assembly.agree(describe, lambda descriptions: refuse_differing("async_save", descriptions))

    def _compare_copies(self, number: int, groups: list[Replicas]) -> None:
        """Compares plain tensors with different digests, and says which differ."""
        by_name = {name: digest for group in groups for name, digest in group.by_name().items()}
        self._say(DIFFER, number, self._assembly.agree(lambda: by_name, differing_copies))

    def _storage(self, name: str, arguments: dict[str, Any]) -> Storage:
        """The storage that `Portable.recipe` has described."""
        key = repr((name, arguments))
        if key not in self._storages:
            module, _, attribute = name.partition(":")
            self._storages[key] = getattr(importlib.import_module(module), attribute)(**arguments)
        return self._storages[key]

    def _keep(self, job: Job, storage: Storage, copies: Copies) -> None:
        """Keeps copies in memory if possible; the disk has the save in any case."""

        def finish(rows: list[list[Any]]) -> tuple[bool, str]:
            assert job.contents is not None
            check_target(storage, job.target)
            return copies.finish(job.target, job.contents, rows)

        is_whole, problem = self._assembly.agree(lambda: copies.write(job.target, job.image, self._data(job)), finish)
        if is_whole:
            copies.keep(job.target)
        self._say(KEPT, job.number, problem)

    def _data(self, job: Job) -> memoryview:
        """The file as it lies in shared memory."""
        return (
            memoryview(b"")
            if job.image is None
            else memoryview(self._shared_memories[job.shared_memory])[: job.image.num_bytes]
        )

    def _write(self, job: Job, storage: Storage) -> list[Path]:
        """Returns: what is to be removed, on rank 0."""
        dying: list[Path] = []

        def write() -> list[Any]:
            if job.image is None:
                return Written().to_plain()
            file, written = file_name(self._rank), Written(job.image.saved_file())
            storage.write_file(job.target.folder / file, self._parts(job, job.image, file, written))
            return written.to_plain()

        def finish(rows: list[list[Any]]) -> None:
            assert job.contents is not None
            commit(storage, job.target, job.contents, rows)

        self._assembly.agree(write, finish)
        if job.keep is not None:
            step = int(job.target.path.name.rpartition("-")[2])
            directory, keep = job.target.path.parent, job.keep
            self._assembly.agree(lambda: None, lambda _: dying.extend(retire_old(storage, directory, step, keep)))
        return dying

    def _parts(self, job: Job, image: Image, file: str, written: Written) -> Iterator[memoryview]:
        """The file's parts from shared memory, which is its image; tells how far it is."""
        memory = self._data(job)
        done = reported = 0

        for part in image.parts(file, lambda number: image.extents[number].of(memory), written):
            yield part
            done += len(part)
            if done >= reported + _REPORT_EVERY_BYTES or done == image.num_bytes:
                reported = done
                self._say(BYTES, job.number, done)


def _refuse(problem: str, remedy: str) -> None:
    raise CheckpointError("async_save", problem, remedy)


def _check_plans(digests: tuple[bytes, ...]) -> None:
    changed = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if changed:
        raise CheckpointError(
            "async_save",
            f"ranks {changed} go by another plan than rank 0: what there is to save has changed on some ranks only.",
            "Save once more: the next save makes a new plan.",
        )


def _yield_to_training() -> None:
    """Uses the processor and the disk only when training leaves them idle, if the system allows such a priority."""
    os.nice(_NICE)
    call = _IOPRIO_SET.get(os.uname().machine)
    if call is not None:
        ctypes.CDLL(None).syscall(call, _IOPRIO_OF_PROCESS, 0, _LOWEST_BEST_EFFORT)


def main() -> None:
    # Interrupts from a terminal, and a cluster's request to end, go to all processes of a job. They are for the
    # training process, which may be saving because of them; when it ends, this one knows.
    ignore_all()
    _yield_to_training()
    try:
        writer = Writer(Wire(socket.socket(fileno=int(sys.argv[1]))))
    except StoreError as error:  # it has gone, and with it the job
        print(f"disttrain.checkpoint's writer: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    writer.run()


if __name__ == "__main__":
    main()
