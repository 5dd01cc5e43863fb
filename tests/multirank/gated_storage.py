"""A storage whose data files wait until a test lets them be written; torch-free."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disttrain.checkpoint.storage.base import LocalStorage


class GatedStorage(LocalStorage):
    """Writes as soon as nobody has shut the gate, a file beside the saves."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    def recipe(self) -> tuple[str, dict[str, Any]]:
        return "tests.multirank.gated_storage:GatedStorage", {"gate": self.gate}

    def write_file(self, path: Path, parts: Iterable[memoryview]) -> None:
        if path.suffix == ".safetensors":
            self._reached.touch()
            with open(self.gate, "a") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        super().write_file(path, parts)

    def wait_until_reached(self, limit_s: float = 240.0) -> None:
        """Until somebody wants to write data."""
        until_s = time.monotonic() + limit_s
        while not self._reached.exists():
            assert time.monotonic() < until_s, "nobody has come to write"
            time.sleep(0.01)

    @property
    def _reached(self) -> Path:
        return Path(f"{self.gate}.reached")

    @contextmanager
    def shut(self) -> Iterator[None]:
        """No data are written within."""
        with open(self.gate, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
