"""Tokens on the disk: a folder of `.npy` files, which are mapped, not read, and `shards.json`, which says what of.

python examples/tokenize_text.py TEXT_FOLDER SHARDS --tokenizer tokenizer.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from disttrain.errors import SettingError
from llama.tokenizer import FILE_NAME, Tokenizer

MEMO = "shards.json"
SIDES = ("training", "held-out")
_KINDS = {"tokenizer": str, "num_text_files": int, "num_tokens": dict}
_REMEDY = "Make the shards again, by examples/tokenize_text.py."


class Shards:
    """Arrays of one dim, read as if they were one."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(array) for array in self._arrays])

    @property
    def size(self) -> int:
        return int(self._ends[-1]) if len(self._arrays) else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens `start` to `start + length`, which may lie in several arrays."""
        at = int(np.searchsorted(self._ends, start, side="right"))
        pieces = []
        while length > 0:
            begin = start - (int(self._ends[at - 1]) if at else 0)
            piece = self._arrays[at][begin : begin + length]
            pieces.append(piece)
            start, length, at = start + len(piece), length - len(piece), at + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, np.uint8)])


class ShardWriter:
    """Writes one side of a folder, in files of `shard_size` tokens at most."""

    def __init__(self, folder: Path, side: str, shard_size: int) -> None:
        self._folder, self._side, self._shard_size = folder, side, shard_size
        self._waiting: list[np.ndarray] = []
        self.num_tokens = 0
        self.num_files = 0

    def add(self, tokens: np.ndarray) -> None:
        self._waiting.append(tokens)
        self.num_tokens += len(tokens)
        if sum(map(len, self._waiting)) >= self._shard_size:
            joined = np.concatenate(self._waiting)
            whole = len(joined) // self._shard_size * self._shard_size
            for part in np.split(joined[:whole], whole // self._shard_size):
                self._write(part)
            self._waiting = [joined[whole:]]

    def close(self) -> None:
        for part in (np.concatenate(self._waiting),) if self._waiting else ():
            if len(part):
                self._write(part)
        self._waiting = []

    def _write(self, part: np.ndarray) -> None:
        np.save(self._folder / f"{self._side}-{self.num_files:05d}.npy", part, allow_pickle=False)
        self.num_files += 1


def write_memo(folder: Path, tokenizer: Tokenizer, num_files: int, num_tokens: dict[str, int]) -> None:
    """What makes a folder one of shards: written last."""
    if tokenizer.path is not None:
        shutil.copyfile(tokenizer.path, folder / FILE_NAME)
    memo = {
        "tokenizer": FILE_NAME if tokenizer.path is not None else tokenizer.name,
        "vocabulary_size": tokenizer.vocabulary_size,
        "num_text_files": num_files,
        "num_tokens": num_tokens,
    }
    (folder / MEMO).write_text(json.dumps(memo, indent=1) + "\n", encoding="utf-8")


def read_memo(folder: Path) -> dict[str, Any]:
    """Raises SettingError where it is not as `write_memo` wrote it."""
    try:
        memo = json.loads((folder / MEMO).read_text(encoding="utf-8"))
        return {name: kind(memo[name]) for name, kind in _KINDS.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise SettingError("train_llama --data", f"{folder / MEMO} is damaged: {error}.", _REMEDY) from error


def open_shards(folder: Path, side: str, memo: dict[str, Any]) -> Shards:
    """One side of a folder, mapped. Raises SettingError where files are missing, or are none of its own."""
    paths = sorted(folder.glob(f"{side}-*.npy"))
    try:
        found = Shards([np.load(path, mmap_mode="r", allow_pickle=False) for path in paths])
    except (ValueError, EOFError) as error:
        raise SettingError("train_llama --data", f"{folder} has a damaged file: {error}.", _REMEDY) from error
    expected = memo["num_tokens"].get(side)
    if found.size != expected:
        problem = f"{folder} has {found.size} {side} tokens in {len(paths)} files; {MEMO} says {expected}."
        raise SettingError("train_llama --data", problem, _REMEDY)
    return found
