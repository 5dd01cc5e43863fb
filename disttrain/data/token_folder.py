"""A folder of tokens: `.npy` files of one dim, a part's in the order of their numbers, and `shards.json`.

    shards.json           {"format": 1, "dtype": "uint16", "num_tokens": {"training": 250, "held-out": 9}, ...}
    training-00000.npy    uint16, one dim
    training-00001.npy

`shards.json` is written last, and makes the folder one of tokens. Whoever writes it may add what it likes to know, such
as the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from disttrain.errors import DataError

MANIFEST: Final = "shards.json"
FORMAT: Final = 1
PARTS: Final = ("training", "held-out")
_REMEDY = "Make the folder again."


class TokenWriter:
    """Writes a folder of tokens, in files of `shard_size` tokens at most; `close` makes it one.

    Args:    folder  made where it is not there;  dtype  of all tokens: the smallest that holds the vocabulary;
             about   plain values to be written into `shards.json`.
    As a context manager it is closed at the end, but not after an exception: then the folder stays none.
    Raises:  DataError for a folder that is one already, and for tokens that `dtype` cannot hold.
    """

    def __init__(
        self, folder: str | Path, dtype: Any, *, shard_size: int = 100_000_000, about: dict[str, Any] | None = None
    ) -> None:
        self._folder = Path(folder)
        self._dtype = np.dtype(dtype)
        self._about = dict(about or {})
        if self._dtype.kind not in "iu" or shard_size < 1:
            problem = f"dtype is {self._dtype}, shard_size {shard_size}."
            raise DataError("TokenWriter", problem, "Give a dtype of integers, and 1 token or more for a file.")
        if (self._folder / MANIFEST).exists():
            raise DataError("TokenWriter", f"{folder} has tokens already.", "Name a new folder.")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._shard_size = shard_size
        self._waiting: dict[str, list[np.ndarray]] = {}
        self.num_tokens: dict[str, int] = {}
        self.num_files: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def add(self, tokens: Any, part: str = PARTS[0]) -> None:
        """Append tokens, an array or a list of integers, to a part."""
        values = np.asarray(tokens)
        array = values.astype(self._dtype, copy=False) if values.size else np.zeros(0, self._dtype)
        if values.ndim != 1 or not np.array_equal(array, values):
            problem = f"tokens of {values.dtype}, shape {values.shape}, are not integers that fit into {self._dtype}."
            raise DataError("TokenWriter.add", problem, "Give one row of integers, or a larger dtype.")
        waiting = self._waiting.setdefault(part, [])
        waiting.append(array)
        self.num_tokens[part] = self.num_tokens.get(part, 0) + len(array)
        self.num_files.setdefault(part, 0)
        if sum(map(len, waiting)) >= self._shard_size:
            joined = np.concatenate(waiting)
            whole = len(joined) // self._shard_size * self._shard_size
            for shard in np.split(joined[:whole], whole // self._shard_size):
                self._write(part, shard)
            self._waiting[part] = [joined[whole:]]

    def close(self) -> None:
        """Write what is left, and make the folder one of tokens."""
        for part, waiting in self._waiting.items():
            rest = np.concatenate(waiting)
            if len(rest):
                self._write(part, rest)
        self._waiting = {}
        manifest = {"format": FORMAT, "dtype": str(self._dtype), "num_tokens": self.num_tokens, **self._about}
        # Renamed, so that it is there as a whole.
        beside = self._folder / f"{MANIFEST}.new"
        beside.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._folder / MANIFEST)

    def _write(self, part: str, shard: np.ndarray) -> None:
        np.save(self._folder / f"{part}-{self.num_files[part]:05d}.npy", shard, allow_pickle=False)
        self.num_files[part] += 1


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The contents of a folder's `shards.json`. Raises: DataError where there is none, or a damaged one."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        numbers = {str(part): int(number) for part, number in manifest["num_tokens"].items()}
    except FileNotFoundError:
        problem = f"{folder} has no {MANIFEST}: it is no folder of tokens, or its writing did not end."
        raise DataError("read tokens", problem, _REMEDY) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError("read tokens", f"{path} is damaged: {error}.", _REMEDY) from error
    if manifest.get("format", FORMAT) != FORMAT:
        problem = f"{path} says format {manifest['format']}; this is {FORMAT}."
        raise DataError("read tokens", problem, "Read it with a newer disttrain, or make the folder again.")
    return {**manifest, "num_tokens": numbers}


def file_names(folder: Path, part: str, manifest: dict[str, Any]) -> list[str]:
    """The files of a part, in their order. Raises: DataError where one between them is missing."""
    names = sorted(path.name for path in folder.glob(f"{part}-*.npy"))
    expected = [f"{part}-{number:05d}.npy" for number in range(len(names))]
    if missing := [name for name in expected if name not in names]:
        tokens = manifest["num_tokens"][part]
        problem = f"{folder} lacks {missing[0]}, one of the files that have its {tokens} {part} tokens."
        raise DataError("read tokens", problem, _REMEDY)
    return names
