"""`python -m disttrain.pipelining`: shows, compares, searches and checks schedules. Torch-free."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from disttrain.command_line import Parser
from disttrain.console import write
from disttrain.errors import ScheduleError
from disttrain.pipelining.passes import lower
from disttrain.pipelining.pictures import chrome_trace, draw_svg, draw_text
from disttrain.pipelining.pictures.look import plural
from disttrain.pipelining.pictures.table import compare_table
from disttrain.pipelining.schedule.catalogue import SCHEDULE_KINDS, find_schedule_kind, make_schedule
from disttrain.pipelining.schedule.costs import Costs, Link
from disttrain.pipelining.schedule.csv_form import from_csv, to_csv
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedule.simulator import simulate
from disttrain.pipelining.schedule.timeline import Timeline
from disttrain.pipelining.schedule.verifier import find_problems
from disttrain.pipelining.searching import search
from disttrain.pipelining.searching.search import Found, named_schedules

WRONG = 1
USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 for a schedule that is wrong, 2 when it was called wrongly."""
    options = _parser().parse_args(argv)
    commands = {"show": _show, "compare": _compare, "search": _search, "check": _check}
    try:
        return commands[options.command](options)
    except ScheduleError as error:
        print(error, file=sys.stderr)  # noqa: T201
    except OSError as error:
        print(f"disttrain.pipelining: {error.filename}: {error.strerror}.", file=sys.stderr)  # noqa: T201
    except KeyboardInterrupt:
        return 130
    return USAGE


def _show(options: argparse.Namespace) -> int:
    schedule = make_schedule(options.name, options.ranks, options.microbatches, options.stages_per_rank)
    costs = _costs(options).split(max(map(len, schedule.placement.stages)))
    if options.lowered:
        schedule = lower(schedule, costs=costs)
    _present(simulate(schedule, costs), options)
    return 0


def _compare(options: argparse.Namespace) -> int:
    costs = _costs(options)
    per_rank = {1, 2, options.stages_per_rank or 2}
    named = named_schedules(options.ranks, options.microbatches, {count: costs.split(count) for count in per_rank})
    write(compare_table(named, _is_terminal()))
    return 0


def _search(options: argparse.Namespace) -> int:
    costs = _costs(options)
    best = search(options.ranks, options.microbatches, costs, max_bytes=options.max_kept)
    named = named_schedules(options.ranks, options.microbatches, {count: costs.split(count) for count in (1, 2)})
    fitting: list[Found] = [each for each in named if each.num_bytes <= options.max_kept]
    write(compare_table([*fitting, best], _is_terminal()))
    _present(best.timeline, options)
    return 0


def _check(options: argparse.Namespace) -> int:
    path: Path = options.file
    schedule = from_csv(path.read_text(encoding="utf-8", errors="replace"), path.name)
    problems = find_problems(schedule, max_live=options.max_live, max_pending=options.max_pending)
    for problem in problems:
        write(str(problem))
    if problems:
        return WRONG
    write(f"{_described(schedule)}: right.")
    _present(simulate(schedule, _costs(options)), options)
    return 0


def _described(schedule: Schedule) -> str:
    messages = "with its messages" if schedule.has_messages else "computations only"
    return (
        f"{schedule.name}, {plural(schedule.num_ranks, 'rank')}, {plural(schedule.num_stages, 'stage')}, "
        f"{plural(schedule.num_microbatches, 'microbatch')}, {messages}"
    )


def _present(timeline: Timeline, options: argparse.Namespace) -> None:
    """Print the picture, write the files that were asked for."""
    width = shutil.get_terminal_size((120, 24)).columns
    write(draw_text(timeline, width=width, in_colour=_is_terminal()))
    if options.svg:
        options.svg.write_text(draw_svg(timeline), encoding="utf-8")
    if options.trace:
        options.trace.write_text(chrome_trace(timeline), encoding="utf-8")
    if options.csv:
        options.csv.write_text(to_csv(timeline.schedule), encoding="utf-8")


def _costs(options: argparse.Namespace) -> Costs:
    link = Link(options.latency, options.bandwidth)
    return Costs(
        options.forward, options.input, options.weight, options.backward, message_bytes=options.message, link=link
    )


def _parser() -> Parser:
    names = ", ".join("/".join((kind.name, *kind.aliases)) for kind in SCHEDULE_KINDS)
    parser = Parser(
        prog="python -m disttrain.pipelining",
        description="Show, compare, search and check pipeline schedules, before anything runs.",
        epilog=f"schedules: {names}",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw one schedule", epilog=f"schedules: {names}")
    show.add_argument("name", metavar="SCHEDULE", type=_name, help="by name, as zbv or 1f1b")
    show.add_argument("--lowered", action="store_true", help="with messages, unsharding and reductions")
    compare = commands.add_parser("compare", help="a table of all schedules for these counts")
    searching = commands.add_parser("search", help="look for a better one, within bounds of memory")
    searching.add_argument(
        "--max-kept", metavar="N", type=float, default=float("inf"), help="microbatches that a rank keeps"
    )
    check = commands.add_parser("check", help="verify a schedule in torch's CSV form")
    check.add_argument("file", metavar="FILE", type=Path)
    check.add_argument("--max-live", metavar="N", type=int, help="forwards that may wait for their backward")
    check.add_argument("--max-pending", metavar="N", type=int, help="backwards for inputs that may wait for their W")
    for command in (show, compare, searching):
        command.add_argument("--ranks", metavar="N", type=int, default=4)
        command.add_argument("--microbatches", metavar="N", type=int, default=8)
    for command in (show, compare):
        command.add_argument("--stages-per-rank", metavar="N", type=int)
    for command in (show, compare, searching, check):
        _add_costs(command)
    for command in (show, searching, check):
        for kind, product in (("svg", "a picture"), ("trace", "a Chrome trace"), ("csv", "torch's CSV form")):
            command.add_argument(f"--{kind}", metavar="FILE", type=Path, help=f"write {product}")
    return parser


def _add_costs(command: argparse.ArgumentParser) -> None:
    costs = command.add_argument_group(
        "times", "in any unit, of a whole rank's part of the model for one microbatch; it is shared by its stages"
    )
    for name, default, meaning in (
        ("forward", 1.0, "F"),
        ("input", 1.0, "I, the backward for inputs"),
        ("weight", 1.0, "W, the backward for weights"),
        ("backward", None, "B, both in one; without it, I + W"),
        ("latency", 0.0, "a message, however small"),
        ("message", 0.0, "a message: its bytes"),
        ("bandwidth", float("inf"), "a link: bytes per unit of time"),
    ):
        costs.add_argument(f"--{name}", metavar="X", type=float, default=default, help=meaning)


def _name(text: str) -> str:
    """Refuses arguments before anything is computed."""
    try:
        return find_schedule_kind(text).name
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(f"{error.problem} {error.remedy}") from None


def _is_terminal() -> bool:
    return sys.stdout.isatty()
