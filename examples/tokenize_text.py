"""Make tokens of a folder of text once, for `train_llama.py --data SHARDS`, which then maps them into memory.

python examples/tokenize_text.py TEXT_FOLDER SHARDS --tokenizer tokenizer.json
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
from llama.tokenizer import FILE_NAME, tokenizer_named
from llama.tokens import SIDES, read_text

from disttrain.data import TokenWriter
from disttrain.errors import SettingError

FILES_AT_ONCE = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", help="folder of text")
    parser.add_argument("shards", type=Path, help="new folder of tokens")
    parser.add_argument("--tokenizer", default="bytes", help="a tokenizer.json, or bytes (the default)")
    parser.add_argument("--shard-size", type=int, default=100_000_000, metavar="N", help="tokens per file")
    options = parser.parse_args()
    try:
        tokenizer = tokenizer_named(options.tokenizer)
        if options.shard_size < 1:
            raise SettingError("tokenize_text", f"--shard-size is {options.shard_size}.", "Give 1 or more.")
        if options.shards.exists():
            raise SettingError("tokenize_text", f"{options.shards} is there already.", "Name a new folder.")
        text = read_text(options.text)
    except SettingError as error:
        sys.exit(str(error))
    about = {
        "tokenizer": FILE_NAME if tokenizer.path is not None else tokenizer.name,
        "vocabulary_size": tokenizer.vocabulary_size,
        "num_text_files": text.num_files,
    }
    dtype = np.min_scalar_type(max(0, tokenizer.vocabulary_size - 1))
    with TokenWriter(options.shards, dtype, shard_size=options.shard_size, about=about) as writer:
        if tokenizer.path is not None:
            shutil.copyfile(tokenizer.path, options.shards / FILE_NAME)
        for side, files in zip(SIDES, (text.training, text.held_out), strict=True):
            for first in range(0, len(files), FILES_AT_ONCE):
                # Not all at once, since tokens take more room than text.
                writer.add(tokenizer.encode(files[first : first + FILES_AT_ONCE], follows=first > 0), side)
    for side in SIDES:
        print(f"{side}: {writer.num_tokens[side]} tokens in {writer.num_files[side]} files")


if __name__ == "__main__":
    main()
