"""A file system without locks; torch-free."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from disttrain.checkpoint.storage.base import LocalStorage


class LocklessStorage(LocalStorage):
    """Nobody can know who is alive."""

    def hold(self, path: Path) -> AbstractContextManager[None]:
        return nullcontext()

    def is_held(self, path: Path) -> bool | None:
        return None

    def remove_unless_held(self, path: Path) -> bool:
        return False


class TakenOver(LocklessStorage):
    """Another job claims the directory as soon as the save of step 2 has begun."""

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        if path.name.startswith("step-00000002"):
            path.with_name(f".claim-000009.tmp-{'f' * 32}").mkdir()
