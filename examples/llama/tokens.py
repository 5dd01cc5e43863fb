"""What is trained on: a folder of text, made into tokens at the start, or a folder of tokens that were made before."""

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

from disttrain.data import TokenArray, read_manifest
from disttrain.errors import SettingError
from llama.tokenizer import FILE_END, FILE_NAME, ByteTokenizer, Tokenizer, tokenizer_named

SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})
HELD_OUT_EVERY = 20
"""One file in so many is never trained on."""
NUM_PROMPT_TOKENS = 48
SIDES = ("training", "held-out")
MARK = bytes([FILE_END])
"""A file with it is no text."""


@dataclass(frozen=True)
class Tokens:
    """`name` and `num_files` say what the text is; `prompt` is there to be continued."""

    name: str
    num_files: int
    tokenizer: Tokenizer
    training: TokenArray
    held_out: TokenArray
    prompt: tuple[int, ...]

    def held_out_rows(self, length: int, first: int, num_rows: int, num_in_all: int) -> torch.Tensor:
        """Rows of `length` + 1 tokens, from number `first` on, of all that are spread evenly over the held-out text."""
        starts = np.linspace(0, self.held_out.size - length - 1, num_in_all).astype(np.int64)[first : first + num_rows]
        rows = [self.held_out.read(start, length + 1) for start in starts.tolist()]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclass(frozen=True)
class Text:
    """Files as bytes: those to train on, and those held out."""

    name: str
    num_files: int
    training: list[bytes]
    held_out: list[bytes]


def read_tokens(data: str | None, tokenizer: str, seq_size: int) -> Tokens:
    """A folder of shards, or of text; by default Python's standard library, which every machine with Python has.

    Shards have their own tokenizer: with them `tokenizer` is bytes, its default, or the same.
    Raises: SettingError when there is too little of it for windows of `seq_size` + 1 tokens, or shards are not whole.
    """
    if data is not None and (Path(data) / "shards.json").is_file():
        tokens = _from_shards(Path(data), tokenizer)
    else:
        tokens = _from_text(read_text(data), tokenizer_named(tokenizer), has_default_prompt=data is None)
    sizes = tokens.training.size, tokens.held_out.size
    if min(sizes) <= seq_size:
        unit = f"{tokens.tokenizer.unit}s"
        problem = f"{tokens.name} has {sum(sizes)} {unit} of text in {tokens.num_files} files"
        rule = f"{sizes[1]} of them are held out, and either side needs --seq {seq_size} + 1"
        raise SettingError("train_llama --data", f"{problem}; {rule}.", "Name more text, or give a smaller --seq.")
    return tokens


def read_text(folder: str | None) -> Text:
    """All files below a folder but those with zero bytes in them, which are no text."""
    if folder is None:
        root, suffix, skipped = Path(sysconfig.get_path("stdlib")), ".py", SKIPPED_FOLDERS
        name = f"the standard library of Python {platform.python_version()}"
    else:
        root, suffix, skipped, name = Path(folder), "", frozenset[str](), folder
        if not root.is_dir():
            raise SettingError("train_llama --data", f"there is no folder {folder}.", "Name one with text, or shards.")
    files = {path: data for path, data in _read_files(root, suffix, skipped) if MARK not in data}
    training = [data for path, data in files.items() if not _is_held_out(path)]
    held_out = [data for path, data in files.items() if _is_held_out(path)]
    if not training or not held_out:  # too few files to choose from
        everything = MARK.join(files.values())
        cut = len(everything) - len(everything) // HELD_OUT_EVERY
        training, held_out = [everything[:cut]], [everything[cut:]]
    return Text(name, len(files), training, held_out)


def _from_text(text: Text, tokenizer: Tokenizer, *, has_default_prompt: bool) -> Tokens:
    training, held_out = (TokenArray([tokenizer.encode(side)]) for side in (text.training, text.held_out))
    start = tokenizer.begin(b"    def __init__(self") if has_default_prompt else _prompt_of(held_out)
    return Tokens(text.name, text.num_files, tokenizer, training, held_out, tuple(start))


def _from_shards(folder: Path, tokenizer: str) -> Tokens:
    manifest = read_manifest(folder)
    if not isinstance(manifest.get("tokenizer"), str) or not isinstance(manifest.get("num_text_files"), int):
        problem = f"shards.json in {folder} does not say of which tokenizer the tokens are, or of how many files."
        raise SettingError("train_llama --data", problem, "Make the shards by examples/tokenize_text.py.")
    name = manifest["tokenizer"]
    own = tokenizer_named(str(folder / name) if name == FILE_NAME else name)
    if tokenizer != ByteTokenizer.name and not _is_same(own, tokenizer_named(tokenizer)):
        problem = f"{folder} has tokens of its own {name}, not of {tokenizer}."
        raise SettingError("train_llama --tokenizer", problem, "Leave --tokenizer out, or make shards with that one.")
    training, held_out = (TokenArray.open(folder, side) for side in SIDES)
    return Tokens(str(folder), manifest["num_text_files"], own, training, held_out, tuple(_prompt_of(held_out)))


def _is_same(one: Tokenizer, other: Tokenizer) -> bool:
    return one.path is not None and other.path is not None and one.path.read_bytes() == other.path.read_bytes()


def _prompt_of(side: TokenArray) -> list[int]:
    return [int(token) for token in side.read(0, min(NUM_PROMPT_TOKENS, side.size))]


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
