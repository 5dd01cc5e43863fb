"""Registers the stores of this user's jobs on this machine.

Each launcher leaves a note in its own folder for temporary files, which goes with it, however it ends.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_NOTE = "job.json"


@dataclass(frozen=True)
class Address:
    """The address of a job's store, and the file with its token; empty: it has none."""

    endpoint: str
    token_file: str = ""


def leave_note(folder: Path, address: Address) -> None:
    """Let `status` on this machine find the job, as long as `folder` is there. Only its owner can read it."""
    fd = os.open(folder / _NOTE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(asdict(address), file)


def addresses_here() -> list[Address]:
    """Of this user's jobs on this machine. Of one that was killed with all its processes the note is still there, and
    another job may have its port."""
    addresses: dict[Address, None] = {}
    for note in sorted(Path(tempfile.gettempdir()).glob(f"disttrain-*/{_NOTE}")):
        try:
            # What somebody else has put there is none of ours.
            if note.lstat().st_uid == os.getuid() == note.parent.lstat().st_uid:
                addresses[Address(**json.loads(note.read_text(encoding="utf-8")))] = None
        except (OSError, ValueError, TypeError):
            continue  # Its job ends just now, or begins.
    return [*addresses]
