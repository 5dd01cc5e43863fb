"""Text as bytes: which files are read, which of them are held out, and which bytes belong to which step.

A step's batch is a pure function of seed and step, of which each rank takes its rows. So one rank and four see the same
batches, and a resumed run sees what the undisturbed one would have seen: there is no loader whose state must be saved.
"""

from __future__ import annotations

import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from disttrain.errors import SettingError

SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})
HELD_OUT_EVERY = 20
"""One file in so many is never trained on."""
NUM_PROMPT_BYTES = 48
FILE_END = b"\0"


@dataclass(frozen=True)
class Text:
    """All bytes: `training` and `held_out` are uint8 of one dim, on the CPU; `prompt` is there to be continued."""

    name: str
    num_files: int
    training: Tensor
    held_out: Tensor
    prompt: bytes

    def batch(self, step: int, *, seed: int, batch_size: int, seq_size: int) -> Tensor:
        """The whole batch of `step`: (batch_size, seq_size + 1) int64, inputs and, one further, targets."""
        starts = np.random.default_rng((seed, step)).integers(len(self.training) - seq_size, size=batch_size)
        return _windows(self.training, starts, seq_size)

    def held_out_batches(self, num_batches: int, *, batch_size: int, seq_size: int) -> Iterator[Tensor]:
        """`num_batches` of the same shape, spread evenly over the held-out text."""
        starts = np.linspace(0, len(self.held_out) - seq_size - 1, num_batches * batch_size).astype(np.int64)
        for rows in np.split(starts, num_batches):
            yield _windows(self.held_out, rows, seq_size)


def read_text(folder: str | None, seq_size: int) -> Text:
    """All text below `folder`; by default that of Python's standard library, which every machine with Python has.

    Raises: SettingError when there is too little of it for windows of `seq_size` + 1 bytes.
    """
    if folder is None:
        root, suffix, skipped = Path(sysconfig.get_path("stdlib")), ".py", SKIPPED_FOLDERS
        name = f"the standard library of Python {platform.python_version()}"
    else:
        root, suffix, skipped, name = Path(folder), "", frozenset[str](), folder
    files = {path: data for path, data in _read_files(root, suffix, skipped) if FILE_END not in data}
    training = FILE_END.join(data for path, data in files.items() if not _is_held_out(path))
    held_out = FILE_END.join(data for path, data in files.items() if _is_held_out(path))
    if not training or not held_out:  # too few files to choose from
        everything = training + held_out
        cut = len(everything) - len(everything) // HELD_OUT_EVERY
        training, held_out = everything[:cut], everything[cut:]
    if len(held_out) <= seq_size:
        problem = f"--data {root} has {len(training) + len(held_out)} bytes of text in {len(files)} files"
        rule = f"{len(held_out)} of them are held out, fewer than --seq {seq_size} + 1"
        raise SettingError("train_lm", f"{problem}; {rule}.", "Name a folder with more text, or give a smaller --seq.")
    prompt = b"    def __init__(self" if folder is None else held_out[:NUM_PROMPT_BYTES]
    return Text(name, len(files), _as_tensor(training), _as_tensor(held_out), prompt)


def _read_files(root: Path, suffix: str, skipped: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    """Relative paths and contents, in the same order on every machine."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(suffix) and name[0] != "."):
            if path.is_file():
                yield path.relative_to(root).as_posix(), path.read_bytes()


def _is_held_out(path: str) -> bool:
    """By the path alone, so that a file stays on its side when others come or go."""
    return zlib.crc32(path.encode()) % HELD_OUT_EVERY == 0


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _windows(text: Tensor, starts: np.ndarray, seq_size: int) -> Tensor:
    return text[torch.from_numpy(starts)[:, None] + torch.arange(seq_size + 1)].long()
