"""`python -m disttrain.examples`: lists the examples, or copies them into a folder. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from disttrain.command_line import Parser
from disttrain.console import table, write
from disttrain.errors import DisttrainError
from disttrain.examples import copy_to, descriptions

USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 where nothing could be copied."""
    parser = Parser(prog="python -m disttrain.examples", description="List the examples, or copy them into a folder.")
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="where copies go (default: only list them)")
    parser.add_argument("--overwrite", action="store_true", help="replace files of DIR that are not as they are here")
    options = parser.parse_args(argv)
    if options.folder is None:
        if options.overwrite:
            parser.error("--overwrite needs a DIR.")
        write(f"{table(('script', 'shows'), [*descriptions().items()], words=(0, 1))}\n")
        write("To copy them:  python -m disttrain.examples examples")
        return 0
    try:
        new = copy_to(options.folder, overwrites=options.overwrite)
    except DisttrainError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return USAGE
    except OSError as error:
        print(f"examples: {error.filename}: {error.strerror}.", file=sys.stderr)  # noqa: T201
        return USAGE
    outcome = f"{len(new)} new files in {options.folder}" if new else f"{options.folder} has them all already"
    write(f"{outcome}. Its README.md tells of each; to begin with:\n")
    write(f"  disttrain-launch --standalone --nproc-per-node 2 {options.folder / 'train_llama.py'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
