"""`python -m disttrain.move PATH`: imports of torch.distributed become disttrain's; what is left is printed."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from disttrain.command_line import Parser
from disttrain.console import table, write
from disttrain.move.tree import Change, changes

LEFT = 1
USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 where --check finds something, 2 when it was called wrongly."""
    options = _parser().parse_args(argv)
    try:
        if not options.path.exists():
            raise FileNotFoundError(2, "There is no such file or folder", str(options.path))
        files = list(changes(options.path))
        if not options.check and not options.diff:
            for change in (change for change in files if change.is_changed):
                change.write()
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        print(f"disttrain.move: {named}{error.strerror}.", file=sys.stderr)  # noqa: T201
        return USAGE
    except KeyboardInterrupt:
        return 130
    if options.diff:
        write("".join(line for change in files if change.is_changed for line in _diff(change)).rstrip("\n"))
    write(_report(files, options.path, is_done=not options.check and not options.diff))
    return LEFT if options.check and any(change.is_changed or change.findings for change in files) else 0


def _diff(change: Change) -> Iterable[str]:
    before, after = change.before.splitlines(keepends=True), change.after.splitlines(keepends=True)
    for line in difflib.unified_diff(before, after, str(change.path), str(change.path)):
        yield line if line.endswith("\n") else f"{line}\n"


def _report(files: Sequence[Change], path: Path, *, is_done: bool) -> str:
    changed = [change for change in files if change.is_changed]
    lines = [f"{_files(len(changed))} {'changed' if is_done else 'to change'}, of {len(files)}."]
    if changed and not is_done:
        lines += [f"  {_name(change.path, path)}" for change in changed]
    rows = [
        (f"{_name(change.path, path)}:{finding.line}", finding.what, finding.page, finding.why)
        for change in files
        for finding in (change.told if is_done else change.findings)
    ]
    if rows:
        head = ("where", "what", "page", "why")
        lines += ["", "Left to you:", table(head, rows, range(len(head)))]
    else:
        lines.append("Nothing is left to you.")
    return "\n".join(lines)


def _name(path: Path, within: Path) -> str:
    return str(path.relative_to(within)) if path != within else str(path)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _parser() -> Parser:
    parser = Parser(
        prog="python -m disttrain.move",
        description="Move a program from torch.distributed to disttrain: its imports, and what uses them.",
    )
    add = parser.add_argument
    add("path", metavar="PATH", type=Path, help="a file, or a folder with all below it")
    add("--check", action="store_true", help="change nothing; exit with 1 where something would change or is left")
    add("--diff", "--dry-run", action="store_true", help="change nothing; print what would change")
    return parser
