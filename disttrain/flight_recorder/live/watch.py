"""`disttrain-flight watch`: a running job on the terminal until `q` or Ctrl-C; plain lines where there is none.

With `rich` installed the terminal shows a table that is drawn over itself. Torch-free.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from disttrain.command_line import Parser
from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.dumps.folders import private_folder
from disttrain.flight_recorder.live.live import Row, Sight, look
from disttrain.flight_recorder.record.record import ranks_text
from disttrain.flight_recorder.views.words import printable, seconds_text
from disttrain.settings import FLIGHT_DIR

if TYPE_CHECKING:
    from rich.console import RenderableType

NO_JOB: Final = 3
_USAGE: Final = 2
_MAX_LINES: Final = 40
_MAX_SHARE: Final = 0.25
"""The share of one core that reading rings may take."""


def watch(argv: Sequence[str]) -> int:
    """Run the command. Returns: 0, 3 when `--once` finds no job, 2 when it was called wrongly."""
    options = _parser().parse_args(argv)
    folder = options.folder or FLIGHT_DIR.read() or private_folder()
    try:
        if options.once:
            sight = look(folder)
            _say("\n".join(lines_of(sight, folder)))
            return NO_JOB if sight is None else 0
        is_screen = sys.stdout.isatty() and sys.stdin.isatty() and importlib.util.find_spec("rich") is not None
        (_show if is_screen else _tell)(folder, options.every)
    except FlightDumpError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return _USAGE
    except KeyboardInterrupt:
        pass  # That is how it ends.
    except BrokenPipeError:
        # Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def lines_of(sight: Sight | None, folder: Path) -> list[str]:
    """The lines of a plain output."""
    if sight is None:
        return [printable(f"no job records into {folder}")]
    lines = [_title(sight)]
    width = max(len(ranks_text(row.ranks)) for row in sight.rows)
    for row in sight.rows[:_MAX_LINES]:
        whom = f", waits for {row.waits_for}" if row.waits_for else ""
        location = "".join(
            f" {text}" for text in (row.line and f"at {row.line}", row.purpose and f"({row.purpose})") if text
        )
        call = f"{row.call}{location}: " if row.call else ""
        lines.append(f"  {ranks_text(row.ranks):{width}}  {call}{row.state}, {seconds_text(row.since_s)}{whom}")
    if len(sight.rows) > _MAX_LINES:
        lines.append(f"  and {len(sight.rows) - _MAX_LINES} more")
    lines += [f"  {'! ' if sight.waits else ''}{sentence}" for sentence in sight.waits or ("nobody waits for long",)]
    lines += [f"  note: {note}" for note in sight.notes[:3]]
    return [printable(line) for line in lines]


def _parser() -> Parser:
    parser = Parser(
        prog="disttrain-flight watch",
        description="Show a running job: each rank's last call, for how long it is in it, and whom it waits for.",
        epilog="Ends by q or Ctrl-C. The ranks' rings are read as files; the job takes no part.",
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        nargs="?",
        help="DISTTRAIN_FLIGHT_DIR of the job; default: what that variable says here, else this user's private folder",
    )
    parser.add_argument("--once", action="store_true", help="look once, print, and end: with 3 when there is no job")
    parser.add_argument("--every", metavar="SECONDS", type=_positive, default=1.0, help="between looks (default: 1)")
    return parser


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError("must be more than 0 and less than a day")
    return seconds


def _say(text: str) -> None:
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _title(sight: Sight) -> str:
    return f"job {sight.job}, {sight.num_seen} of {sight.world_size} ranks, {time.strftime('%H:%M:%S')}"


def _looks(folder: Path, every_s: float) -> Iterator[tuple[Sight | None, float]]:
    """Yields what is seen, and how long to rest then: many ranks' rings are not read all the time."""
    while True:
        start_s = time.monotonic()
        sight = look(folder)
        took_s = time.monotonic() - start_s
        yield sight, max(every_s - took_s, took_s * (1 / _MAX_SHARE - 1))


def _tell(folder: Path, every_s: float) -> None:
    for sight, rest_s in _looks(folder, every_s):
        _say("\n".join(lines_of(sight, folder)))
        time.sleep(rest_s)


def _show(folder: Path, every_s: float) -> None:
    from rich.live import Live  # heavy, and not everywhere

    with _keys() as keys, Live(screen=True, auto_refresh=False) as screen:
        for sight, rest_s in _looks(folder, every_s):
            screen.update(_table(sight, folder, screen.console.height), refresh=True)
            ready, _, _ = select.select([keys], [], [], rest_s)
            if ready and os.read(keys, 64).strip().lower() in (b"q", b"\x1b", b""):
                return


@contextmanager
def _keys() -> Iterator[int]:
    """The terminal's keys as they are pressed; Ctrl-C still interrupts."""
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _table(sight: Sight | None, folder: Path, height: int) -> RenderableType:
    from rich.console import Group  # as above
    from rich.table import Table  # as above
    from rich.text import Text  # as above

    if sight is None:
        return Text(printable(f"No job records into {folder}. Waiting; q ends."))
    table = Table(expand=True, box=None, header_style="dim", pad_edge=False)
    for name in ("ranks", "last call", "at", "made for", "state", "how long", "waits for"):
        table.add_column(name, no_wrap=name != "last call", justify="right" if name == "how long" else "left")
    room = max(3, height - 6 - len(sight.waits))
    for row in sight.rows[:room]:
        table.add_row(*(Text(printable(text)) for text in _cells(row)), style="yellow" if row.is_held_up else "")
    below = [Text(printable(f"! {sentence}"), style="bold") for sentence in sight.waits]
    if not below:
        below = [Text("Nobody waits for long.", style="dim")]
    if len(sight.rows) > room:
        table.add_row(f"and {len(sight.rows) - room} more", style="dim")
    return Group(Text(_title(sight) + "; q ends", style="bold"), Text(), table, Text(), *below)


def _cells(row: Row) -> tuple[str, ...]:
    who = ranks_text(row.ranks).split(" ", 1)[1]
    return who, row.call, row.line, row.purpose, row.state, seconds_text(row.since_s), row.waits_for
