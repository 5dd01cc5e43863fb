"""Checkpointer: the saves of one training run in one directory, by step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from disttrain.checkpoint.agreement import Council
from disttrain.checkpoint.loading import load_folder
from disttrain.checkpoint.manifest import MANIFEST
from disttrain.checkpoint.saving import remove_save, save_folder
from disttrain.checkpoint.storage import LocalStorage, Storage
from disttrain.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")


class Checkpointer:
    """Saves in `directory`, as folders `step-00000042`.

    Args: directory  made by the first save;  keep  how many saves stay, the newest ones; None: all of them.
    All methods are collective: every rank of the default world, or one process without a world.
    """

    def __init__(self, directory: str | Path, keep: int | None = 2, *, storage: Storage | None = None) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError("Checkpointer", f"keep is {keep}.", "Keep at least 1 save; None keeps all.")
        self.directory = Path(directory)
        self.keep = keep
        self._storage = storage or LocalStorage()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a state as that of `step`, then remove the oldest saves. See `save` for what a state is.

        Raises CheckpointError, on every rank: when it could not be saved, or when there is a save of `step`, with all
        saves as they were; when an old save could not be removed, with `step` saved.
        """
        if step < 0:
            raise CheckpointError("Checkpointer.save", f"step is {step}.", "Count steps from 0.")
        council = Council("Checkpointer.save")
        save_folder(council, state, self._folder(step), self._storage, lambda name: bool(_STEP.fullmatch(name)))
        council.agree(lambda: None, lambda _: self._remove_old(step))

    def latest(self) -> int | None:
        """The newest step with a whole save; None where there is none."""
        newest: int | None = Council("Checkpointer.latest").agree(
            lambda: None, lambda _: max(self._steps(), default=None)
        )
        return newest

    def load(self, state: dict[str, Any], step: int | None = None) -> int:
        """Load the save of `step` (default: the latest) into `state`, in place. Returns the step. See `load`."""
        council = Council("Checkpointer.load")
        found: int = council.agree(lambda: None, lambda _: self._found(step))
        load_folder(council, state, self._folder(found), self._storage)
        return found

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        """The steps that were saved whole, ascending."""
        found = [_STEP.fullmatch(name) for name in self._storage.names(self.directory)]
        steps = [int(match[1]) for match in found if match is not None]
        return sorted(step for step in steps if MANIFEST in self._storage.names(self._folder(step)))

    def _found(self, step: int | None) -> int:
        steps = self._steps()
        if not steps:
            raise CheckpointError("load", f"there is no save in {self.directory}.", "Save first, or look elsewhere.")
        if step is not None and step not in steps:
            raise CheckpointError("load", f"{self.directory} has no save of step {step}.", f"It has steps {steps}.")
        return steps[-1] if step is None else step

    def _remove_old(self, step: int) -> None:
        """Remove all but the newest saves; never the one just made, whatever its step."""
        others = [other for other in self._steps() if other != step]
        num_kept = len(others) if self.keep is None else self.keep - 1
        for old in others[: len(others) - num_kept]:
            try:
                remove_save(self._storage, self._folder(old))
            except OSError as error:
                raise CheckpointError(
                    "save", f"step {step} is saved, but step {old} could not be removed: {error}.", "Remove it by hand."
                ) from error
