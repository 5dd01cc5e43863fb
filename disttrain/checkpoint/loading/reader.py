"""Reads the blocks that a load needs, and only these, and verifies each; several fetches at a time.

Each thread reads into its own memory, which the disk can write to directly. It verifies a block while that is in the
processor's cache, and copies it to the tensors, while other threads wait for the disk.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.manifest import Chunk, Manifest, block_checksums
from disttrain.checkpoint.loading.fetches import Fetch, plan_fetches
from disttrain.checkpoint.loading.scattering import Targets, scatter
from disttrain.checkpoint.plan import Read
from disttrain.checkpoint.storage.base import Readable, ReadableFile
from disttrain.checkpoint.storage.local_file import PAGE_BYTES, aligned_memory
from disttrain.checkpoint.storage.open_files import OpenFiles
from disttrain.errors import CheckpointCorruptError, CheckpointError
from disttrain.process_group.calls.packing import unpack

NUM_THREADS = 8


class Reader:
    """Reads from one save; CheckpointCorruptError, naming file, tensor and offset, for bytes that were not saved."""

    can_share = True
    """True if the manifest alone says where bytes are, so that ranks can read for each other."""

    def __init__(self, storage: Readable, folder: Path, manifest: Manifest) -> None:
        self.storage = storage
        self.folder = folder
        self._manifest = manifest

    def read_tensors(self, reads: Sequence[Read], targets: Targets) -> None:
        """Fill the targets, local tensors by where in the whole they lie, from `reads` in the order of files."""
        fetches = plan_fetches(reads, self._manifest.block_bytes)
        largest = max((fetch.num_bytes for fetch in fetches), default=0)
        local = threading.local()

        def fill(fetch: Fetch) -> None:
            if not hasattr(local, "memory"):
                local.memory = FetchMemory(largest)
            data = local.memory.for_fetch(fetch)
            self.bring(files, fetch, data)
            scatter(fetch, data, targets)

        with OpenFiles(self.opened, [fetch.file for fetch in fetches]) as files, devices_caught_up(targets):
            if len(fetches) == 1:
                fill(fetches[0])
                return
            with ThreadPoolExecutor(NUM_THREADS, "disttrain-read") as pool:
                finish_all([pool.submit(fill, fetch) for fetch in fetches])

    def bring(self, files: OpenFiles, fetch: Fetch, data: memoryview) -> None:
        """Fill `data` with what is fetched, verified. Any thread may call it."""
        with files.use(fetch.file) as file:
            with self.readable(fetch.file):
                num_read = file.read_at(fetch.start, data)
            for piece in fetch.pieces:
                begin = piece.offset - fetch.start
                end = begin + piece.stop - piece.start
                # Within the block, so that the file is told of its errors.
                self._verify(piece.reads[0].name, piece.chunk, piece.start, data[begin:end], num_read >= end)

    def read_values(self, chunks: Mapping[str, Chunk]) -> dict[str, Any]:
        """The values in these chunks, by the same names."""
        values = {}
        in_order = sorted(chunks.items(), key=lambda item: (item[1].file, item[1].offset))
        for file_name, of_file in itertools.groupby(in_order, key=lambda item: item[1].file):
            with self.opened(file_name) as file:
                for name, chunk in of_file:
                    data = np.empty(chunk.num_bytes, np.uint8)
                    self._read_chunk(file, name, chunk, data.data)
                    values[name] = self.unpacked(file_name, name, data.tobytes())
        return values

    def unpacked(self, file_name: str, name: str, data: bytes) -> Any:
        """The value that was packed."""
        try:
            return unpack(data)
        except Exception as error:  # any error may come of bytes that were not packed by us
            raise CheckpointError(
                "load",
                f"the value {name!r} of {self.folder / file_name} cannot be unpacked: {len(data)} bytes hold no value.",
                f"Use what wrote it: {self._manifest.made_by}.",
            ) from error

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadableFile]:
        saved = self._manifest.files[name]
        with ExitStack() as stack:
            with self.readable(name):
                file = stack.enter_context(self.storage.open_file(self.folder / name))
            if file.num_bytes != saved.num_bytes:
                raise CheckpointCorruptError(
                    "load", f"{self.folder / name} has {file.num_bytes} bytes, {saved.num_bytes} were saved.", _REMEDY
                )
            header = Chunk(name, 0, saved.header_bytes, Box((), ()), saved.header_checksums)
            self._read_chunk(file, "the header", header, memoryview(bytearray(saved.header_bytes)))
            yield file

    @contextmanager
    def readable(self, name: str) -> Iterator[None]:
        """Has errors of the file system say which file of a save cannot be read."""
        try:
            yield
        except FileNotFoundError:
            raise CheckpointCorruptError("load", f"{self.folder / name} is missing.", _REMEDY) from None
        except OSError as error:
            problem = f"{self.folder / name} cannot be read: {error}."
            raise CheckpointCorruptError("load", problem, _UNREADABLE) from error

    def _read_chunk(self, file: ReadableFile, name: str, chunk: Chunk, data: memoryview) -> None:
        with self.readable(chunk.file):
            num_read = file.read_at(chunk.offset, data)
        self._verify(name, chunk, 0, data, num_read == len(data))

    def _verify(self, name: str, chunk: Chunk, start: int, data: memoryview, is_whole: bool) -> None:
        """Raise where whole blocks, from byte `start` of the chunk on, are not as they were saved."""
        if not chunk.checksums and is_whole:  # of a format that has none
            return
        block_bytes = self._manifest.block_bytes
        checksums = block_checksums(data, block_bytes)
        first = start // block_bytes * 8
        saved = chunk.checksums[first : first + len(checksums)]
        if checksums == saved and is_whole:
            return
        wrong = next((at for at in range(0, len(checksums), 8) if checksums[at : at + 8] != saved[at : at + 8]), 0)
        offset = chunk.offset + start + wrong // 8 * block_bytes
        raise CheckpointCorruptError(
            "load",
            f"{self.folder / chunk.file} does not have the bytes of {name!r} that were saved, "
            f"in the {block_bytes} bytes from offset {offset} on.",
            _REMEDY,
        )


class FetchMemory:
    """Memory for any fetch of at most `num_bytes`, that direct I/O can write to."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = aligned_memory(num_bytes + PAGE_BYTES)

    def for_fetch(self, fetch: Fetch) -> memoryview:
        """Lies in its page as the fetch does in the file's."""
        first = fetch.start % PAGE_BYTES
        return self._memory[first : first + fetch.num_bytes]


def finish_all(running: Sequence[Future[Any]]) -> None:
    """Wait for all of them. Raises the first error, and lets what has not begun then be."""
    try:
        for future in running:
            future.result()
    finally:
        for future in running:
            future.cancel()


@contextmanager
def devices_caught_up(targets: Targets) -> Iterator[None]:
    """Threads have streams of their own: what the caller was given before is done before, and theirs at the end."""
    devices = {tensor.device for boxes in targets.values() for tensor in boxes.values() if tensor.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    yield
    for device in devices:
        torch.cuda.synchronize(device)


_REMEDY = "Load another save; this one was damaged after it was written."
_UNREADABLE = "Load another save, or look after the file system."
