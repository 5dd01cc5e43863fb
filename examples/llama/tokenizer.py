"""Text to tokens and back: bytes as they are, or by a tokenizer.json of Hugging Face's `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from disttrain.errors import SettingError

FILE_END = 0
"""Among bytes: no text has it."""
ENDS = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<|eot_id|>")
"""What tokenizers have for it, by common models."""
FILE_NAME = "tokenizer.json"


class Tokenizer(Protocol):
    """`name` is what a person knows it by, `path` its file, where it has one."""

    name: str
    unit: str
    path: Path | None
    vocabulary_size: int

    def encode(self, texts: Sequence[bytes], *, follows: bool = False) -> np.ndarray:
        """All texts, one after the other, each with its end, where there is a token for it.

        `follows`: whether texts come before, to which these are added.
        """
        ...

    def begin(self, text: bytes) -> list[int]:
        """The tokens of a text that is to be continued, so without an end."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """One token per byte: nothing to train or to download, and any file is text."""

    name = "bytes"
    unit = "byte"
    path = None
    vocabulary_size = 256

    def encode(self, texts: Sequence[bytes], *, follows: bool = False) -> np.ndarray:
        # Between texts only: the last one's end comes with the next.
        end = bytes([FILE_END])
        return np.frombuffer((end if follows else b"") + end.join(texts), dtype=np.uint8)

    def begin(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token % 256 for token in tokens).decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizer.json, or the folder that it is in. Raises SettingError where it cannot be read."""

    unit = "token"

    def __init__(self, path: Path) -> None:
        self.path = path / FILE_NAME if path.is_dir() else path
        self.name = str(path)
        self._own = _read(self.path)
        # Where numbers have been left out, there are fewer tokens than that.
        self.vocabulary_size = max(self._own.get_vocab().values(), default=-1) + 1
        self._end = next((token for token in map(self._own.token_to_id, ENDS) if token is not None), None)

    def encode(self, texts: Sequence[bytes], *, follows: bool = False) -> np.ndarray:
        encoded = self._own.encode_batch_fast([text.decode("utf-8", "replace") for text in texts], False)
        end = [] if self._end is None else [self._end]
        dtype = np.uint16 if self.vocabulary_size <= 1 << 16 else np.uint32
        return np.concatenate([np.array([*one.ids, *end], dtype=dtype) for one in encoded] or [np.zeros(0, dtype)])

    def begin(self, text: bytes) -> list[int]:
        return list(self._own.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._own.decode(list(tokens))


def tokenizer_named(name: str) -> Tokenizer:
    """`bytes`, or a path. Raises SettingError."""
    return ByteTokenizer() if name == ByteTokenizer.name else FileTokenizer(Path(name))


def _read(path: Path) -> Any:
    try:
        import tokenizers  # optional, and not needed for bytes
    except ImportError:
        problem = "the library `tokenizers` is not installed."
        raise SettingError("train_llama --tokenizer", problem, "Run: pip install tokenizers") from None
    if not path.is_file():
        raise SettingError("train_llama --tokenizer", f"there is no file {path}.", "Name a tokenizer.json, or `bytes`.")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise SettingError("train_llama --tokenizer", f"{path}: {error}.", "Name a tokenizer.json.") from error
