"""All benchmarks of this machine's processors, one after another, and one table of them against torch.

    python benchmarks [--only store dtensor] [--keep] [--page]

Each runs in a process of its own, with sizes that take a quarter of an hour in all. `--keep` writes their results to
benchmarks/results/, `--page` runs nothing and writes docs/benchmarks.md from what lies there. Times mean something on a
machine that does nothing else: its load is shown. Those on GPUs (*_gpu.py) are run one by one, under disttrain-launch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import OURS, TORCH, Row, aligned, read, shown
from page import PAGE, RESULTS, as_page

HERE = Path(__file__).parent
LIMIT_S = 600
FLAGS: dict[str, list[str]] = {
    "collectives": [],
    "functional": ["--rounds", "20"],
    "dtensor": ["--rounds", "20"],
    "dtensor_compile": [],
    "tp_host": [],
    "experts_host": [],
    "fsdp2_host": [],
    "pipeline_host": [],
    "operations": [],
    "pipeline_backward": [],
    "compiling": ["--layers", "4"],
    "store": ["--rounds", "10"],
    "store_startup": ["--rounds", "3"],
    "store_tls": ["--rounds", "5"],
    "rendezvous": ["--nodes", "100", "1000", "10000"],
    "scale": ["--quick", "--within", "90"],
    "launching": ["--repeats", "3"],
    "launch_screen": ["--repeats", "3"],
    "network": ["--ranks", "2", "--parallelisms", "fsdp", "tp", "pp", "--delays", "0", "1", "10", "--shapes", "128x6"],
    "checkpoint": ["--mib", "512", "--rounds", "3"],
    "checkpoint_memory": ["--mib", "128", "--rounds", "3"],
    "flight_recorder": [],
    "flight_analyzer": [],
    "flight_views": ["--num-ranks", "64"],
}
LAUNCHED = {"pipeline_host": 2, "operations": 4}
"""Ranks of those that are started by disttrain-launch."""


def run(name: str, results: Path) -> str:
    """Run one, which writes `results`. Returns: what went wrong, or nothing."""
    launcher = ["-m", "disttrain_launch", "--standalone", "--nproc-per-node", str(LAUNCHED.get(name))]
    command = [sys.executable, *(launcher if name in LAUNCHED else []), str(HERE / f"{name}.py"), *FLAGS[name]]
    try:
        ran = subprocess.run(
            [*command, "--json", str(results)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        return f"it took more than {LIMIT_S} s; {last_word(late.stderr)}"
    return "" if ran.returncode == 0 else last_word(ran.stderr)


def last_word(printed: str | bytes | None) -> str:
    """The last line of what a benchmark has printed to standard error; of one that was ended those are bytes."""
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def compared(rows: dict[str, list[Row]]) -> str:
    """The rows that torch has a counterpart for, as one table; then where torch is ahead."""
    pairs = [(name, row) for name, of in rows.items() for row in of if row.ratio is not None]
    cells = [
        [name, row.case, row.unit, shown(row.sides[OURS]), shown(row.sides[TORCH]), f"{row.ratio:.2f}"]
        for name, row in pairs
    ]
    behind = [f"{name}: {row.case}" for name, row in pairs if row.is_behind]
    ahead = f"torch is ahead in {len(behind)} of {len(pairs)}" + ("".join(f"\n  {each}" for each in behind))
    return f"{aligned(['benchmark', 'case', 'unit', OURS, TORCH, 'ours / torch'], cells)}\n\n{ahead}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FLAGS, default=list(FLAGS), metavar="NAME", help=", ".join(FLAGS))
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/NAME.json")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}, run nothing")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(as_page(RESULTS), encoding="utf-8")
        return
    rows: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.only, 1):
            results = (RESULTS if options.keep else Path(folder)) / f"{name}.json"
            print(f"[{number}/{len(options.only)}] {name} (load {os.getloadavg()[0]:.1f}) ... ", end="", flush=True)
            began_s = time.perf_counter()
            problem = run(name, results)
            print(f"{time.perf_counter() - began_s:.0f} s{f': left out, {problem}' if problem else ''}", flush=True)
            if not problem:
                rows[name] = read(results)[1]
    print(f"\n{compared(rows)}")


if __name__ == "__main__":
    main()
