"""`python -m disttrain info`: what is installed and what it can do here, to be pasted into a report of a bug."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from disttrain.command_line import Parser
from disttrain.console import write
from disttrain.doctor.info import as_text, collect


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m disttrain", description=__doc__)
    info = parser.add_subparsers(dest="command", required=True).add_parser(
        "info", help="print versions, devices, transports and settings"
    )
    info.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(argv)
    facts = collect()
    write(json.dumps(facts, indent=1) if options.json else as_text(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
