"""torch's `storage_writer=` and `storage_reader=`: where a save goes or lies, and in which format.

They have torch's arguments; those that say how fast torch writes and reads change nothing here.
Source: torch/distributed/checkpoint/filesystem.py, hf_storage.py and _fsspec_filesystem.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disttrain.checkpoint.storage.base import Storage, locate
from disttrain.errors import ArgumentError, CheckpointError

PathLike = str | os.PathLike[str]


def checked_path(operation: str, path: PathLike) -> str:
    """`path` as text. Raises ArgumentError for what is none."""
    if isinstance(path, bytes) or not isinstance(path, str | os.PathLike):
        raise ArgumentError(operation, f"a path is {type(path).__name__}.", "Give a str or a pathlib.Path.")
    return os.fspath(path)


class _Endpoint:
    """A path or URL, which `checkpoint_id=` may replace; `options` are those of fsspec's file system."""

    def __init__(self, path: PathLike, options: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._options = dict(options or {})

    def located(self, checkpoint_id: PathLike | None = None) -> tuple[Storage, Path]:
        """The storage and the path in it."""
        where = checked_path(type(self).__name__, self.path if checkpoint_id is None else checkpoint_id)
        if not self._options:
            return locate(where)
        # fsspec is an optional extra, and heavy.
        from disttrain.checkpoint.fsspec_storage import open_url

        return open_url(where, **self._options)


class FileSystemWriter(_Endpoint):
    """Saves in our own format to a folder, or to a URL that fsspec knows.

    Args: overwrite  whether a save that is there gives way; False: the save is refused.
    """

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: object | None = None,
        serialization_format: object | None = None,
    ) -> None:
        super().__init__(path)
        if _extensions:
            raise CheckpointError(
                "FileSystemWriter", "_extensions are torch's own.", "Compress what a save has written, or its storage."
            )
        self.overwrite = overwrite


class FsspecWriter(FileSystemWriter):
    """`FileSystemWriter` for URLs; `kwargs` are arguments of fsspec's file system, such as `anon=True`."""

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: object | None = None,
        serialization_format: object | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, overwrite=overwrite, _extensions=_extensions)
        self._options = kwargs


class HuggingFaceStorageWriter(FileSystemWriter):
    """Saves tensors as Hugging Face's libraries do: whole ones, in safetensors files with an index.

    Args: path  a folder;  fqn_to_index_mapping  which of the files 1 to N each tensor goes to; default: all to one.
    Ranks share the work and files are whole whatever `save_distributed` and `enable_consolidation` say.
    """

    def __init__(
        self,
        path: PathLike,
        fqn_to_index_mapping: Mapping[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
    ) -> None:
        super().__init__(path)
        if not isinstance(fqn_to_index_mapping, Mapping | None):
            raise ArgumentError(
                "HuggingFaceStorageWriter",
                f"fqn_to_index_mapping is {type(fqn_to_index_mapping).__name__}.",
                "Give a dict of tensors' names to numbers of files, from 1.",
            )
        self.fqn_to_index_mapping = None if fqn_to_index_mapping is None else dict(fqn_to_index_mapping)


class FileSystemReader(_Endpoint):
    """Loads from a folder, or a URL that fsspec knows: a save of ours, or one of torch.distributed.checkpoint."""

    def __init__(self, path: PathLike, _extension_registry: object | None = None) -> None:
        super().__init__(path)

    def read_metadata(self) -> Any:
        """Names, sizes and dtypes of what is saved, as torch.distributed.checkpoint.metadata.Metadata."""
        # Here: they need torch, which lists of saves do without.
        from disttrain.checkpoint.calls.metadata import as_metadata
        from disttrain.checkpoint.calls.opening import open_ours_or_torchs  # as above

        return as_metadata(open_ours_or_torchs(*self.located()).manifest)


class FsspecReader(FileSystemReader):
    """`FileSystemReader` for URLs; `kwargs` are arguments of fsspec's file system."""

    def __init__(self, path: PathLike, **kwargs: Any) -> None:
        super().__init__(path)
        self._options = kwargs


class HuggingFaceStorageReader(FileSystemReader):
    """Loads a folder of safetensors files, with or without an index, by the names in them."""

    def __init__(self, path: PathLike, thread_count: int = 1) -> None:
        super().__init__(path)


class BroadcastingTorchSaveReader(FileSystemReader):
    """Loads a file of torch.save that holds a dict, into a state that lies in any way.

    Each rank reads what it needs, whatever `coordinator_rank` says.
    """

    def __init__(self, checkpoint_id: PathLike | None = None, coordinator_rank: int = 0) -> None:
        super().__init__("" if checkpoint_id is None else checkpoint_id)


def as_writer(operation: str, writer: object) -> FileSystemWriter:
    """The argument `storage_writer=`, one of torch's as ours. Raises CheckpointError for what is neither."""
    if isinstance(writer, FileSystemWriter):
        return writer
    path = _path_of_torchs(writer, ("FileSystemWriter", "FsspecWriter"))
    if path is None:
        raise CheckpointError(operation, f"storage_writer= is a {type(writer).__name__}.", _WRITERS)
    return FileSystemWriter(path, overwrite=getattr(writer, "overwrite", True))


def as_reader(operation: str, reader: object) -> FileSystemReader:
    """The argument `storage_reader=`, one of torch's as ours; see `as_writer`."""
    if isinstance(reader, FileSystemReader):
        return reader
    for kind, names in (
        (HuggingFaceStorageReader, ("HuggingFaceStorageReader",)),
        (FileSystemReader, ("FileSystemReader", "FsspecReader")),
    ):
        path = _path_of_torchs(reader, names)
        if path is not None:
            return kind(path)
    raise CheckpointError(operation, f"storage_reader= is a {type(reader).__name__}.", _READERS)


_OWN = "A class of your own is a Storage, for storage=: open_file, write_file, and so on."
_WRITERS = f"Give a FileSystemWriter, FsspecWriter or HuggingFaceStorageWriter of disttrain.checkpoint. {_OWN}"
_READERS = f"Give a FileSystemReader, FsspecReader or HuggingFaceStorageReader of disttrain.checkpoint. {_OWN}"


def _path_of_torchs(endpoint: object, names: tuple[str, ...]) -> PathLike | None:
    """The path of one of torch's own objects of these classes (no subclass); None for others."""
    kind = type(endpoint)
    if kind.__module__.startswith("torch.distributed.checkpoint.") and kind.__name__ in names:
        path: PathLike = vars(endpoint)["path"]
        return path
    return None
