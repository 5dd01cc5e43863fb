"""`disttrain-flight`: a folder of dumps in, the cause of the hang out; `disttrain-flight watch` shows a running job.

Torch-free; what only some calls need is loaded by these.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from disttrain._python.garbage import uncollected
from disttrain.command_line import Parser, add_version
from disttrain.console import write
from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.analysis.analysis import Analysis, analyze
from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.flight_recorder.views.report import as_json, as_text

USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run `disttrain-flight` and return its exit code: that of the first verdict, or 2 when it was called wrongly."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["watch"]:
        from disttrain.flight_recorder.live.watch import watch  # reads a terminal; for this command only

        return watch(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        # Millions of records contain no reference cycles; searching for these would take a third of the time.
        with uncollected():
            analysis = analyze(Path(options.path))
            write(as_json(analysis) if options.json else as_text(analysis))
            _draw(analysis, options)
    except FlightDumpError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return USAGE
    except KeyboardInterrupt:
        return 130
    return analysis.verdicts[0].kind.exit_code


def _draw(analysis: Analysis, options: argparse.Namespace) -> None:
    """The files that were asked for. Raises FlightDumpError for one that cannot be written."""
    if options.html is not None:
        from disttrain.flight_recorder.views.page import write_page  # hashes and drawing: not for the text

        write_page(options.html, analysis)
    if options.trace is not None:
        from disttrain.flight_recorder.views.trace import write_trace  # as above

        write_trace(options.trace, analysis.dumps)


def _parser() -> Parser:
    codes = "\n".join(f"  {kind.exit_code:3}  {kind.value.replace('_', ' ')}" for kind in Kind)
    parser = Parser(
        prog="disttrain-flight",
        description="Say why a job hangs, from the dumps of its ranks' flight recorders.",
        epilog="`disttrain-flight watch [DIR]` shows a job that runs.\n\n"
        f"exit codes, by the first verdict:\n{codes}\n    {USAGE}  wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    parser.add_argument(
        "path", metavar="DIR", help="folder with the dumps (DISTTRAIN_FLIGHT_DIR of the job), or one dump"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: an object with verdicts, dumps and notes")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page: verdicts, timeline, waits, stacks")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write a timeline for Perfetto or chrome://tracing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
