"""What is trained on: a folder of text, made into tokens at the start, or a folder of tokens that were made before."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from disttrain.errors import SettingError
from llama.shards import MEMO, SIDES, Shards, open_shards
from llama.tokenizer import FILE_END, Tokenizer, tokenizer_named

SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})
HELD_OUT_EVERY = 20
"""One file in so many is never trained on."""
NUM_PROMPT_TOKENS = 48
MARK = bytes([FILE_END])
"""A file with it is no text."""


@dataclass(frozen=True)
class Tokens:
    """`name` and `num_files` say what the text is; `prompt` is there to be continued."""

    name: str
    num_files: int
    tokenizer: Tokenizer
    training: Shards
    held_out: Shards
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """Files as bytes: those to train on, and those held out."""

    name: str
    num_files: int
    training: list[bytes]
    held_out: list[bytes]


def read_tokens(data: str | None, tokenizer: str, seq_size: int) -> Tokens:
    """A folder of shards, or of text; by default Python's standard library, which every machine with Python has.

    Shards have their own tokenizer, so that `tokenizer` counts for text only.
    Raises: SettingError when there is too little of it for windows of `seq_size` + 1 tokens.
    """
    if data is not None and (Path(data) / MEMO).is_file():
        tokens = _from_shards(Path(data))
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
    files = {path: data for path, data in _read_files(root, suffix, skipped) if MARK not in data}
    training = [data for path, data in files.items() if not _is_held_out(path)]
    held_out = [data for path, data in files.items() if _is_held_out(path)]
    if not training or not held_out:  # too few files to choose from
        everything = MARK.join(files.values())
        cut = len(everything) - len(everything) // HELD_OUT_EVERY
        training, held_out = [everything[:cut]], [everything[cut:]]
    return Text(name, len(files), training, held_out)


def _from_text(text: Text, tokenizer: Tokenizer, *, has_default_prompt: bool) -> Tokens:
    training, held_out = (Shards([tokenizer.encode(side)]) for side in (text.training, text.held_out))
    start = (
        tokenizer.encode([b"    def __init__(self"]) if has_default_prompt else held_out.read(0, _prompt_of(held_out))
    )
    return Tokens(text.name, text.num_files, tokenizer, training, held_out, tuple(start.tolist()))


def _from_shards(folder: Path) -> Tokens:
    memo = json.loads((folder / MEMO).read_text(encoding="utf-8"))
    name = memo["tokenizer"]
    own = tokenizer_named(str(folder / name) if (folder / name).is_file() else name)
    training, held_out = (open_shards(folder, side) for side in SIDES)
    start = held_out.read(0, _prompt_of(held_out))
    return Tokens(str(folder), memo["num_text_files"], own, training, held_out, tuple(start.tolist()))


def _prompt_of(side: Shards) -> int:
    return min(NUM_PROMPT_TOKENS, side.size)


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
