"""`python -m disttrain.checkpoint`: lists, verifies, compares, converts and removes saves. Starts without torch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from disttrain.checkpoint.format.manifest import MANIFEST
from disttrain.checkpoint.format.reading import read_manifest
from disttrain.checkpoint.format.verifying import find_damage, total_bytes
from disttrain.checkpoint.listings import described_folder, described_save, folder_text, save_text
from disttrain.checkpoint.progress import progress, speed_text
from disttrain.checkpoint.storage.base import HOLD_SUFFIX, Storage, locate
from disttrain.checkpoint.storage.folders import TEMPORARY, remove_leftovers, set_aside, steps
from disttrain.command_line import Parser
from disttrain.console import write
from disttrain.errors import CheckpointCorruptError, CheckpointError

WRONG = 1
USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 for damage or a difference, 2 when it was called wrongly."""
    options = _parser().parse_args(argv)
    commands = {"ls": _ls, "verify": _verify, "diff": _diff, "convert": _convert, "gc": _gc}
    try:
        return commands[options.command](options)
    except CheckpointError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return WRONG if isinstance(error, CheckpointCorruptError) else USAGE
    except OSError as error:
        print(f"disttrain.checkpoint: {error}.", file=sys.stderr)  # noqa: T201
    except KeyboardInterrupt:
        return 130
    return USAGE


def _ls(options: argparse.Namespace) -> int:
    storage, path = locate(options.path)
    if MANIFEST in storage.names(path):
        described = described_save(read_manifest(storage, path))
        text = save_text(options.path, described)
    elif (described := described_folder(storage, path))["saves"] or described["unfinished"]:
        text = folder_text(options.path, described)
    else:
        # Other formats need torch to be read.
        from disttrain.checkpoint.interop.calls import open_any

        described = described_save(open_any(options.path).manifest)
        text = save_text(options.path, described)
    write(json.dumps(described, indent=2) if options.json else text)
    return 0


def _verify(options: argparse.Namespace) -> int:
    storage, path = locate(options.path)
    folders = [path] if MANIFEST in storage.names(path) else list(steps(storage, path).values()) or [path]
    num_wrong = 0
    for folder in folders:
        try:
            manifest = read_manifest(storage, folder)
        except CheckpointCorruptError as error:
            # The others are looked at all the same.
            write(f"{folder}: {error.problem}")
            write(f"{folder}: damaged")
            num_wrong += 1
            continue
        start_s, num_bytes = time.monotonic(), total_bytes(manifest)
        with progress(f"verifying {folder.name}", num_bytes) as advance:
            damage = find_damage(storage, folder, manifest, advance, options.threads)
        for sentence in damage:
            write(f"{folder}: {sentence}")
        outcome = "damaged" if damage else "whole"
        write(f"{folder}: {outcome}; {speed_text(num_bytes, time.monotonic() - start_s)}")
        num_wrong += len(damage) > 0
    return WRONG if num_wrong else 0


def _diff(options: argparse.Namespace) -> int:
    from disttrain.checkpoint.format.comparing import compared_bytes, find_differences  # needs torch
    from disttrain.checkpoint.interop.calls import open_any  # needs torch

    first, second = open_any(options.first), open_any(options.second)
    num_differences = 0
    with progress("comparing", compared_bytes(first)) as advance:
        for difference in find_differences(first, second, advance if options.values else None):
            write(difference)
            num_differences += 1
    if not num_differences:
        write("the same" if options.values else "the same names, shapes and dtypes; --values compares more")
    return WRONG if num_differences else 0


def _convert(options: argparse.Namespace) -> int:
    from disttrain.checkpoint.format.comparing import compared_bytes  # needs torch
    from disttrain.checkpoint.interop.calls import convert, open_any  # needs torch
    from disttrain.checkpoint.interop.selection import select  # needs torch

    source, start_s = open_any(options.source), time.monotonic()
    chosen, left_out = select(source.manifest, options.to, options.only, options.without)
    num_bytes = compared_bytes(replace(source, manifest=chosen))
    with progress(f"converting to {options.to}", num_bytes) as advance:
        convert(
            options.source, options.target, options.to, only=options.only, without=options.without,
            max_file_bytes=options.max_file_bytes, advance=advance,
        )  # fmt: skip
    write(f"{options.target}: {options.to}; {speed_text(num_bytes, time.monotonic() - start_s)}")
    if left_out:
        more = f" and {len(left_out) - 8} more" if len(left_out) > 8 else ""
        parts = ", ".join(left_out[:8]) + more
        write(f"{options.target}: without {parts}; --only and --without say what else")
    return 0


def _gc(options: argparse.Namespace) -> int:
    storage, directory = locate(options.path)
    before = _unfinished(storage, directory)
    remove_leftovers(storage, directory, lambda _: True)
    remaining = _unfinished(storage, directory)
    for name in sorted(remaining) if options.unfinished else ():
        storage.remove_folder(directory / name)
        remaining.discard(name)
    for name in sorted(before - remaining):
        write(f"removed {directory / name}")
    if options.keep is not None:
        saves = list(steps(storage, directory).values())
        for folder in saves[: max(0, len(saves) - options.keep)]:
            storage.remove_folder(set_aside(storage, folder))
            write(f"removed {folder}")
    for name in sorted(remaining):
        write(f"left {directory / name}: a living process holds it, or nobody can know")
    return 0


def _unfinished(storage: Storage, directory: Path) -> set[str]:
    names = {name for name in storage.names(directory) if TEMPORARY.fullmatch(name)}
    return {name for name in names if not name.endswith(HOLD_SUFFIX)}


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return count


def _parser() -> Parser:
    parser = Parser(
        prog="python -m disttrain.checkpoint",
        description="List, verify, compare and remove saves. Paths may be URLs that fsspec knows.",
        epilog="exit codes: 0; 1 for damage or a difference; 2 for wrong usage or no such save",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, explained: str, *paths: str) -> Any:
        added = commands.add_parser(name, help=explained, description=explained[0].upper() + explained[1:] + ".")
        for path in paths:
            added.add_argument(path)
        return added

    listing = command("ls", "what is in a save, or which saves are in a folder", "path")
    listing.add_argument("--json", action="store_true", help="print JSON")
    verifying = command("verify", "compare every byte with its checksum, of one save or of all in a folder", "path")
    verifying.add_argument(
        "--threads", type=_count, help="how many read at once (default: twice the processors, <= 16)"
    )
    comparing = command("diff", "what differs between two saves, of any formats", "first", "second")
    comparing.add_argument("--values", action="store_true", help="compare values too: which differ, and by how much")
    converting = command("convert", "write a save of any format in another: ours, torch's, or safetensors", "source")
    converting.add_argument("target", help="a new folder")
    converting.add_argument("--to", required=True, choices=("disttrain", "dcp", "safetensors"))
    converting.add_argument(
        "--max-file-bytes", type=_count, default=5_000_000_000, metavar="N", help="how large a safetensors file gets"
    )
    converting.add_argument(
        "--only", action="append", default=[], metavar="NAME",
        help="take this part alone, such as model, or names like a pattern; may be repeated; default for safetensors, "
        "which hold tensors alone: model, where there is more",
    )  # fmt: skip
    converting.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="leave this part out, such as optimizer"
    )
    removing = command("gc", "remove what dead saves left in a folder", "path")
    removing.add_argument("--keep", type=_count, metavar="N", help="remove all but the N newest steps, too")
    removing.add_argument(
        "--unfinished", action="store_true",
        help="also what may be under way, where there are no locks; be sure that nobody saves there",
    )  # fmt: skip
    return parser
