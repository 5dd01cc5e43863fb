"""Saves in the memory of nodes: files in a folder under /dev/shm, which outlive the processes that wrote them.

No process has to stay for them. The launcher creates the folder and removes it when the job ends, in whatever way. A
node that is lost loses its own files. Torch-free.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from disttrain.checkpoint.format.manifest import MANIFEST, TABLES, plain_name
from disttrain.checkpoint.format.reading import decode
from disttrain.checkpoint.memory.replica_placement import Holding, ReplicaName
from disttrain.errors import CheckpointError
from disttrain.settings import LOCAL_WORLD_SIZE, MEMORY_DIR

_UNDER_WAY = ".part"
_KEPT = "kept"
"""A file by which a node knows that a save became whole: it stays until there is a newer one."""


@dataclass(frozen=True)
class PeerMemory:
    """Folders in the nodes' memory that keep copies of saves.

    folder          of each node for itself, in memory; default: the launcher's (DISTTRAIN_MEMORY_DIR)
    ranks_per_node  default: the launcher's (LOCAL_WORLD_SIZE), else all ranks
    """

    folder: str | Path | None = None
    ranks_per_node: int | None = None

    def of(self, directory: Path) -> NodeMemory:
        """The folder of this node for the saves of `directory`. Raises CheckpointError when there is no folder."""
        folder = self.folder or MEMORY_DIR.read()
        if folder is None:
            raise CheckpointError(
                "Checkpointer",
                f"peer_memory has no folder: {MEMORY_DIR.name} is not set.",
                "Start the job by disttrain-launch, or give PeerMemory(folder) one under /dev/shm.",
            )
        ranks_per_node = self.ranks_per_node or LOCAL_WORLD_SIZE.read()
        name = xxhash.xxh3_64_hexdigest(os.fsencode(directory.absolute()))
        return NodeMemory(Path(folder).absolute() / name, ranks_per_node)


@dataclass(frozen=True)
class NodeMemory:
    """One node's folder for the saves of one directory: a folder for each save, with files as on the disk.

    What is written has its name only once it is there as a whole. Methods raise OSError.
    """

    root: Path
    ranks_per_node: int | None = None

    def to_plain(self) -> list[Any]:
        return [str(self.root), self.ranks_per_node]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> NodeMemory:
        return cls(Path(plain[0]), plain[1])

    def node_size(self, world_size: int) -> int:
        """The number of ranks that share this folder."""
        return self.ranks_per_node or world_size

    def make_room(self) -> int:
        """Removes all saves but the newest complete one, before a new save. Returns: the last `order` there was."""
        saves = self._saves()
        whole = [save.order for save in saves if (self.root / save.folder / _KEPT).exists()]
        for save in saves:
            if save.order != max(whole, default=0):
                shutil.rmtree(self.root / save.folder, ignore_errors=True)
        return max((save.order for save in saves), default=0)

    def write(self, save: str, file: str, parts: Iterable[memoryview]) -> None:
        """Write a file."""
        target = self.path_of(save, file)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        under_way = target.with_name(target.name + _UNDER_WAY)
        descriptor = os.open(under_way, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            for part in parts:
                done = 0
                while done < len(part):
                    done += os.write(descriptor, part[done:])
            under_way.rename(target)
        except BaseException:
            with suppress(OSError):
                under_way.unlink()
            raise
        finally:
            os.close(descriptor)

    def keep(self, save: str) -> None:
        """The save has become whole."""
        with suppress(FileNotFoundError):  # a node that has nothing of it
            (self.root / save / _KEPT).touch(mode=0o600)

    def go_on_from(self, save: ReplicaName) -> None:
        """Keeps the save that was loaded until there is a newer one, though its writers may have died before they knew
        it complete.

        What is newer than it was of no use.
        """
        for other in self._saves():
            if other.order > save.order:
                (self.root / other.folder / _KEPT).unlink(missing_ok=True)
        self.keep(save.folder)

    def holdings(self) -> list[Holding]:
        """The copies in this folder, by save; a manifest that is damaged is none."""
        result = []
        for save in self._saves():
            files = [file for file in os.scandir(self.root / save.folder) if not file.name.endswith(_UNDER_WAY)]
            has = {file.name: file.stat().st_size for file in files if file.name != _KEPT}
            needed = self._needed(save.folder) if MANIFEST in has else None
            result.append(
                Holding(save, {file: size for file, size in has.items() if needed or file != MANIFEST}, needed)
            )
        return result

    def path_of(self, save: str, file: str) -> Path:
        """The path of a file of a save. Raises OSError for names that lead elsewhere."""
        try:
            return self.root / plain_name(save) / plain_name(file)
        except ValueError as error:
            raise OSError(f"{error} is not one of a save") from error

    def _needed(self, save: str) -> dict[str, int] | None:
        path = self.root / save / MANIFEST
        try:
            data = path.read_bytes()
            manifest = decode(data, str(path))
        except CheckpointError:
            return None
        needed = {MANIFEST: len(data), **{name: file.num_bytes for name, file in manifest.files.items()}}
        spans = [file.table for file in manifest.files.values() if file.table is not None]
        return needed | {TABLES: max(span.offset + span.num_bytes for span in spans)} if spans else needed

    def _saves(self) -> list[ReplicaName]:
        try:
            return [save for folder in os.listdir(self.root) if (save := ReplicaName.of(folder)) is not None]
        except FileNotFoundError:
            return []
