"""The ids of trackers' runs, in a file beside the checkpoints, by which a run that is resumed goes on in each."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Final

FILE: Final = "trackers.json"


class RunIds:
    """The ids by trackers' names, in `folder`; None: they are not kept."""

    def __init__(self, folder: Path | str | None, *, goes_on: bool) -> None:
        """`goes_on`: take those that are there. Raises OSError where they cannot be read."""
        self._file = None if folder is None else Path(folder) / FILE
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}
        if goes_on and self._file is not None and self._file.exists():
            try:
                self._ids = {str(name): str(run_id) for name, run_id in json.loads(self._file.read_bytes()).items()}
            except (ValueError, AttributeError):
                pass  # not a file of ours: runs begin anew

    def of(self, name: str) -> str | None:
        """The id of the run to go on with."""
        return self._ids.get(name)

    def keep(self, name: str, run_id: str) -> None:
        """Write an id down, in one step; called by several threads. Raises OSError."""
        with self._lock:
            self._ids[name] = run_id
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                temporary = self._file.with_name(f".{FILE}.part")
                temporary.write_text(json.dumps(self._ids, indent=1) + "\n", encoding="utf-8")
                temporary.replace(self._file)
