"""What grows with the world: the rows of benchmarks/scale/*.py, on worlds that are played and sockets of this machine.

    python benchmarks/scale.py [--quick] [--only meshes startup] [--limit 300] [--within 600]

Each part runs in a process of its own, so that none finds the memory or the caches of another; one that takes longer
than `--limit` seconds or fails is left out, and named, and so are those for which nothing is left of `--within` seconds
in all. `--quick` takes small worlds. docs/scale.md tells what the rows say.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Row, command_line, finish, read

PARTS = Path(__file__).parent / "scale"


def run(name: str, options: argparse.Namespace, results: Path, limit_s: float) -> str:
    """Run one part, which writes `results`. Returns: what went wrong, or nothing."""
    if limit_s <= 0:
        return "there was no time left for it"
    command = [sys.executable, __file__, "--part", name, "--json", str(results), *["--quick"] * options.quick]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"it took more than {limit_s:.0f} s"
    if ran.returncode == 0:
        return ""
    return (ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1]


def main() -> None:
    names = sorted(path.stem for path in PARTS.glob("*.py"))
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="small worlds")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="of each part (default: 300)")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="S", help="of all parts (default: any)")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        # The folder has this script's name, so that no import could tell them apart.
        sys.path.insert(0, str(PARTS))
        finish(importlib.import_module(options.part).rows(options.quick), options.json)
        return
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            results = Path(folder) / f"{name}.json"
            started_s = time.monotonic()
            limit_s = min(options.limit, began_s + options.within - started_s)
            if problem := run(name, options, results, limit_s):
                left_out[name] = problem
                print(f"{name} is left out: {problem}", file=sys.stderr)
            else:
                rows += read(results)[1]
                print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    finish(rows, options.json, left_out=left_out)
    if not rows:
        sys.exit("No part has rows.")


if __name__ == "__main__":
    main()
