"""What grows with the world: the rows of benchmarks/scale/*.py, on worlds that are played and sockets of this machine.

    python benchmarks/scale.py [--quick] [--only meshes startup] [--limit 300]

Each part runs in a process of its own, so that none finds the memory or the caches of another; one that takes longer
than `--limit` seconds or fails is left out, and named. `--quick` takes small worlds. docs/scale.md tells what the rows
say.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Row, command_line, finish, read

PARTS = Path(__file__).parent / "scale"


def run(name: str, options: argparse.Namespace, results: Path) -> str:
    """Run one part, which writes `results`. Returns: what went wrong, or nothing."""
    command = [sys.executable, __file__, "--part", name, "--json", str(results), *["--quick"] * options.quick]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=False)
    except subprocess.TimeoutExpired:
        return f"it took more than {options.limit:g} s"
    if ran.returncode == 0:
        return ""
    return (ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1]


def main() -> None:
    names = sorted(path.stem for path in PARTS.glob("*.py"))
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="small worlds")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="of each part (default: 300)")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        # The folder has this script's name, so that no import could tell them apart.
        sys.path.insert(0, str(PARTS))
        finish(importlib.import_module(options.part).rows(options.quick), options.json)
        return
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            results = Path(folder) / f"{name}.json"
            if problem := run(name, options, results):
                left_out[name] = problem
                print(f"{name} is left out: {problem}", file=sys.stderr)
            else:
                rows += read(results)[1]
    finish(rows, options.json, left_out=left_out)
    if not rows:
        sys.exit("No part has rows.")


if __name__ == "__main__":
    main()
