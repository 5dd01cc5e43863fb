"""Tokens in files that are mapped into memory, not read, and look like one array of one dim."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from disttrain.data.token_folder import MANIFEST, PARTS, file_names, read_manifest
from disttrain.errors import DataError


class TokenArray:
    """Arrays of one dim, of integers, that are read as if they were one.

    Raises: DataError for arrays of other kinds.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        for array in arrays:
            if array.ndim != 1 or array.dtype.kind not in "iu":
                problem = f"an array of {array.dtype} has shape {array.shape}."
                raise DataError("TokenArray", problem, "Tokens are integers in one row.")
        self._arrays = arrays

    @classmethod
    def open(cls, path: str | Path, part: str = PARTS[0], *, dtype: Any = None) -> TokenArray:
        """Maps what lies at `path`.

        Args:    path   a folder of `TokenWriter`'s, of which `part` is taken;  a `.npy` file;  or, with `dtype`, a file
                        of nothing but tokens of that dtype, such as the `.bin` files of many tokenizing scripts.
        Raises:  DataError for what is missing, damaged, or of another form than it says.
        """
        path = Path(path)
        if path.is_dir():
            return _open_folder(path, part)
        if not path.is_file():
            raise DataError("TokenArray.open", f"there is no {path}.", "Name a folder of tokens, or a file.")
        if dtype is not None:
            return cls([_map_plain(path, np.dtype(dtype))])
        if path.suffix != ".npy":
            problem = f"{path} does not say what its bytes are."
            raise DataError("TokenArray.open", problem, "Give its dtype, such as dtype='uint16', or a .npy file.")
        return cls([_map_npy(path)])

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(array) for array in self._arrays])

    @property
    def size(self) -> int:
        """The number of tokens."""
        return int(self._ends[-1]) if len(self._arrays) else 0

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens `start` to `start + length`, which may lie in several files. Raises: DataError for more than all."""
        if not 0 <= start <= start + length <= self.size:
            problem = f"tokens {start} to {start + length} are asked for, of {self.size}."
            raise DataError("TokenArray.read", problem, "Ask for those that there are.")
        at = int(np.searchsorted(self._ends, start, side="right"))
        pieces = []
        while length > 0:
            begin = start - (int(self._ends[at - 1]) if at else 0)
            piece = self._arrays[at][begin : begin + length]
            pieces.append(piece)
            start, length, at = start + len(piece), length - len(piece), at + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, np.uint8)])

    def documents(self, end: int) -> Documents:
        """The documents that end with the token `end`, as a sequence of arrays. Reads all tokens once."""
        return Documents(self, end)


class Documents(Sequence[np.ndarray]):
    """Documents in an array, each with its end token; the last one may lack it."""

    def __init__(self, tokens: TokenArray, end: int) -> None:
        self._tokens = tokens
        ends, base = [np.zeros(1, np.int64)], 0
        for array in tokens._arrays:
            ends.append(np.flatnonzero(array == end) + base + 1)
            base += len(array)
        self._ends = np.concatenate(ends)
        if self._ends[-1] < base:
            self._ends = np.append(self._ends, base)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        start, stop = (int(end) for end in self._ends[index % len(self) : index % len(self) + 2])
        return self._tokens.read(start, stop - start)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each."""
        lengths: list[int] = np.diff(self._ends).tolist()
        return lengths


def _open_folder(folder: Path, part: str) -> TokenArray:
    manifest = read_manifest(folder)
    if part not in manifest["num_tokens"]:
        problem = f"{folder} has no part {part!r}; it has {', '.join(map(repr, manifest['num_tokens'])) or 'none'}."
        raise DataError("TokenArray.open", problem, "Name one that it has.")
    names = file_names(folder, part, manifest)
    arrays = [_map_npy(folder / name) for name in names]
    tokens = TokenArray(arrays)
    dtypes = {str(array.dtype) for array in arrays}
    expected = manifest["num_tokens"][part]
    if tokens.size != expected:
        problem = f"{folder} has {tokens.size} {part} tokens in {len(names)} files; {MANIFEST} says {expected}."
        raise DataError("TokenArray.open", problem, "Make the folder again.")
    if "dtype" in manifest and dtypes - {manifest["dtype"]}:
        problem = f"{folder} has tokens of {', '.join(sorted(dtypes))}; {MANIFEST} says {manifest['dtype']}."
        raise DataError("TokenArray.open", problem, "Make the folder again.")
    return tokens


def _map_npy(path: Path) -> np.ndarray:
    try:
        mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError("TokenArray.open", f"{path} is damaged: {error}.", "Make the file again.") from error
    return mapped


def _map_plain(path: Path, dtype: np.dtype) -> np.ndarray:
    num_bytes = path.stat().st_size
    if num_bytes % dtype.itemsize or not num_bytes:
        problem = f"{path} has {num_bytes} bytes, and a token of {dtype} has {dtype.itemsize}."
        raise DataError("TokenArray.open", problem, "Give the dtype that it was written with.")
    return np.memmap(path, dtype, mode="r")
