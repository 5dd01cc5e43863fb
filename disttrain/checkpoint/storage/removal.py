"""Removes old saves while the program goes on: freeing a file may take half as long as writing it. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from disttrain.checkpoint.storage.base import Storage


def remove_all(storage: Storage, folders: Sequence[Path]) -> None:
    """Remove folders that are no saves any more; what cannot be removed now the next save removes."""
    for folder in folders:
        with suppress(OSError):
            storage.remove_folder(folder)


class Removal:
    """Removes by a thread, which the process waits for when it ends."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._thread: threading.Thread | None = None

    def begin(self, folders: Sequence[Path]) -> None:
        """Remove these, once those before are gone."""
        self.wait()
        if folders:
            self._thread = threading.Thread(target=remove_all, args=(self._storage, folders), name="disttrain-remove")
            self._thread.start()

    def wait(self) -> None:
        """Return once all is gone."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
