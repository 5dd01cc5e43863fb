"""Saves on storage that fsspec reaches: S3, Google Cloud Storage, HDFS, memory.

Such storage has no rename and no locks. A save is written under its temporary name, and the service copies it to the
final one, the manifest last. A folder counts as a save once it has its manifest, and the manifest is one object, which
is there as a whole or not at all. A save that dies before leaves objects that nothing reads.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import fsspec
import msgpack
from fsspec.implementations.memory import MemoryFileSystem

from disttrain.checkpoint.format.manifest import MANIFEST
from disttrain.checkpoint.storage.base import ReadableFile
from disttrain.checkpoint.storage.folders import TEMPORARY
from disttrain.errors import CheckpointError

_INSTEAD = "Use `save`, or a file system that strings and numbers describe, such as a URL's."


class _RemoteFile:
    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        info = system.info(path)
        if info["type"] != "file":
            raise OSError(errno.EINVAL, f"It is no file, but of type {info['type']!r}", path)
        self.num_bytes = int(info["size"])

    def read_at(self, offset: int, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        data = self._system.cat_file(self._path, start=offset, end=offset + len(buffer))
        buffer[: len(data)] = data
        return len(data)


class FsspecStorage:
    """A file system of fsspec; paths are its own, such as `bucket/runs/lm`. Satisfies `Storage` and `Portable`.

    Args: system  such as `fsspec.filesystem("s3", anon=False)`.
    """

    def __init__(self, system: fsspec.AbstractFileSystem) -> None:
        self._system = system

    def recipe(self) -> tuple[str, dict[str, Any]]:
        """Raises CheckpointError for a file system that another process cannot have."""
        kind = type(self._system).__name__
        inner = self._system
        while (wrapped := getattr(inner, "fs", None)) is not None:  # such as DirFileSystem
            inner = wrapped
        if isinstance(inner, MemoryFileSystem):
            raise CheckpointError("async_save", f"what a {kind} holds, no other process sees.", _INSTEAD)
        options = self._system.to_dict()
        try:
            msgpack.packb(options)
        except (TypeError, ValueError, OverflowError) as error:
            problem = f"the options of this {kind} cannot be given to another process: {error}."
            raise CheckpointError("async_save", problem, _INSTEAD) from error
        return f"{__name__}:{storage_of.__name__}", {"options": options}

    def make_folder(self, path: Path) -> None:
        self._system.makedirs(str(path), exist_ok=True)

    def write_file(self, path: Path, parts: Iterable[memoryview]) -> None:
        with self._system.open(str(path), "wb") as file:
            for part in parts:
                file.write(part)

    @contextmanager
    def open_file(self, path: Path) -> Iterator[ReadableFile]:
        yield _RemoteFile(self._system, str(path))

    def names(self, path: Path) -> list[str]:
        """Objects, folders under way, and folders with a manifest: another one is not there yet."""
        self._system.invalidate_cache(str(path))
        try:
            rows = self._system.ls(str(path), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = {Path(entry["name"].rstrip("/")).name: entry["type"] == "directory" for entry in rows}
        return sorted(
            name
            for name, is_folder in entries.items()
            if not is_folder or TEMPORARY.fullmatch(name) or self._system.exists(str(path / name / MANIFEST))
        )

    def sync_folder(self, path: Path) -> None:
        """An object is durable once it has been written."""

    def move(self, source: Path, target: Path) -> None:
        if TEMPORARY.fullmatch(target.name) and not TEMPORARY.fullmatch(
            source.name
        ):  # it is being removed: a folder without a manifest counts as gone
            self._system.rm_file(str(source / MANIFEST))
            self._system.rm(str(source), recursive=True)
            return
        if self._system.exists(str(target / MANIFEST)):
            raise FileExistsError(f"{target} is there already")
        self._system.makedirs(str(target), exist_ok=True)
        names = sorted(self.names(source), key=lambda name: name == MANIFEST)
        for name in names:
            self._system.cp_file(str(source / name), str(target / name))
        try:
            if MANIFEST in names:  # first, so that the rest does not count as a save
                self._system.rm_file(str(source / MANIFEST))
            self._system.rm(str(source), recursive=True)
        except OSError:  # the save is there; `gc` removes what is left
            pass

    def remove_folder(self, path: Path) -> None:
        if self._system.exists(str(path)):
            self._system.rm(str(path), recursive=True)

    def hold(self, path: Path) -> AbstractContextManager[None]:
        """Does nothing: there are no locks."""
        return nullcontext()

    def is_held(self, path: Path) -> None:
        """Always None: nobody can know."""

    def remove_unless_held(self, path: Path) -> bool:
        """False: nobody can know whether the process that wrote it is alive."""
        return False


def storage_of(options: dict[str, Any]) -> FsspecStorage:
    """The storage that `FsspecStorage.recipe` describes."""
    return FsspecStorage(fsspec.AbstractFileSystem.from_dict(options))


def open_url(url: str, **options: Any) -> tuple[FsspecStorage, Path]:
    """The storage that a URL means, and the path in it; `options` are the file system's."""
    system, path = fsspec.core.url_to_fs(url, **options)
    return FsspecStorage(system), Path(path)
