"""The few file operations that saves are made of. Tests put in one that fails or kills.

Nothing here knows of formats. What a method has written or moved is durable when the caller has also synced the folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from disttrain.checkpoint.storage import direct
from disttrain.checkpoint.storage.exchanging import exchange
from disttrain.checkpoint.storage.local_file import LocalFile
from disttrain.checkpoint.storage.locks import is_locked, lock, remove_unheld
from disttrain.errors import CheckpointError

HOLD_SUFFIX = ".lock"


class ReadableFile(Protocol):
    """An open file, which several threads may read at once."""

    num_bytes: int

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset` on; returns how many bytes there were."""
        ...


class Readable(Protocol):
    """The operations that a load needs. Errors are OSError."""

    def open_file(self, path: Path) -> AbstractContextManager[ReadableFile]:
        """Open a file for reading."""
        ...

    def names(self, path: Path) -> list[str]:
        """The names in a folder, sorted; nothing where there is no folder."""
        ...


class Storage(Readable, Protocol):
    """Folders and files. Errors are OSError."""

    def make_folder(self, path: Path) -> None:
        """Make a new folder, and those above it; fails where there is one."""
        ...

    def write_file(self, path: Path, parts: Iterable[memoryview]) -> None:
        """Write a new file of these parts; its content is durable on return. Parts stay as they are until then."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Make durable which names the folder has."""
        ...

    def move(self, source: Path, target: Path) -> None:
        """Rename a folder in one step; fails where `target` is."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Remove a folder with all in it."""
        ...

    def hold(self, path: Path) -> AbstractContextManager[None]:
        """Mark that a living process is writing to `path`, for as long as the block runs."""
        ...

    def is_held(self, path: Path) -> bool | None:
        """True if a living process holds `path`; None where nobody can know."""
        ...

    def remove_unless_held(self, path: Path) -> bool:
        """Remove a folder that no living process holds. Returns whether it is gone."""
        ...


@runtime_checkable
class Exchanging(Protocol):
    """A storage where two folders can change places in one step."""

    def exchange(self, first: Path, second: Path) -> bool:
        """Have two folders change places. Returns False, with nothing done, where that cannot be."""
        ...


@runtime_checkable
class Portable(Protocol):
    """A storage that another process can have too, which asynchronous saves need."""

    def recipe(self) -> tuple[str, dict[str, Any]]:
        """A recipe for the process that writes saves to make an equal storage: "module:class" and keyword arguments for
        msgpack."""
        ...


class LocalStorage:
    """A local or shared POSIX file system. Satisfies `Storage`, `Exchanging` and `Portable`."""

    def recipe(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}:{type(self).__qualname__}", {}

    def make_folder(self, path: Path) -> None:
        _make_parents(path)
        path.mkdir()

    def write_file(self, path: Path, parts: Iterable[memoryview]) -> None:
        direct.write_file(path, parts)

    @contextmanager
    def open_file(self, path: Path) -> Iterator[ReadableFile]:
        with closing(LocalFile(path)) as file:
            yield file

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sync_folder(self, path: Path) -> None:
        _sync_folder(path)

    def move(self, source: Path, target: Path) -> None:
        if target.exists():  # rename would replace an empty folder
            raise FileExistsError(f"{target} is there already")
        source.rename(target)

    def exchange(self, first: Path, second: Path) -> bool:
        return exchange(first, second)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path)

    @contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        _make_parents(path)
        with lock(_lock_path(path)):
            yield

    def is_held(self, path: Path) -> bool | None:
        return is_locked(_lock_path(path))

    def remove_unless_held(self, path: Path) -> bool:
        # Checked first: a process that makes a folder takes its lock before, and keeps it until the folder is gone.
        named = _lock_path(path)
        is_there, is_named = path.exists(), named.exists()
        remove_unheld(named)
        if is_locked(named) is not False:
            return False
        if is_there:
            shutil.rmtree(path, ignore_errors=True)
        if is_named:
            named.unlink(missing_ok=True)
        return not path.exists()


def read_small(storage: Readable, path: Path) -> bytes:
    """Reads all of a small file. Errors are OSError."""
    with storage.open_file(path) as file:
        data = bytearray(file.num_bytes)
        num_read = file.read_at(0, memoryview(data))
    return bytes(data[:num_read])


def locate(path: str | Path, storage: Storage | None = None) -> tuple[Storage, Path]:
    """The storage and the path in it: `storage` if there is one, the one that a URL such as `s3://bucket/runs` names,
    else the local files.

    Raises CheckpointError for a URL that fsspec does not know, or when fsspec is not installed.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError("checkpoint", f"{path!r} is no path.", "Give a path or a URL.")
    if storage is not None and not hasattr(storage, "write_file"):
        problem = f"storage is {type(storage).__name__}."
        raise CheckpointError("checkpoint", problem, "Give an object with the methods of checkpoint.Storage.")
    text = str(path)
    if storage is not None or "://" not in text:
        return LocalStorage() if storage is None else storage, Path(path)
    try:
        # fsspec is an optional extra, and heavy.
        from disttrain.checkpoint.fsspec_storage import open_url

        return open_url(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            "checkpoint", f"{text} cannot be reached: {error}.", "Install disttrain[fsspec], and what serves such URLs."
        ) from error


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + HOLD_SUFFIX)


def _make_parents(path: Path) -> None:
    """Make the folders above `path`, each durable in the one above it."""
    folder = path.parent
    if not folder.is_dir():
        _make_parents(folder)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
