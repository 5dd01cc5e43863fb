"""`python -m tests.launch_faults --runs 200 --seed 0`: jobs with random faults, and what they left behind.

Each runs in namespaces of its own, so that every process, port and file there is the job's. Prints what went wrong,
with the seed that plays it again, and a table of outcomes. `--runs 1 --seed N` also prints what its launchers said.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.launch_faults.play import Result
from tests.launch_faults.running import play_all


def table(results: list[Result]) -> str:
    """Outcomes by fault."""
    by_fault: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_fault[result.fault].append(result)
    lines = [
        "| fault | runs | too late to matter | exit codes | slowest end, s | wrong |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for fault, some in sorted(by_fault.items()):
        late = sum(not result.landed for result in some)
        codes = sorted({str(code) for result in some for code in result.codes})
        slowest_s = max(result.ended_s for result in some)
        wrong = sum(bool(result.wrong) for result in some)
        lines.append(f"| {fault} | {len(some)} | {late} | {', '.join(codes)} | {slowest_s:.1f} | {wrong} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others follow")
    parser.add_argument("--at-once", type=int, default=2)
    flags = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for result in play_all(range(flags.seed, flags.seed + flags.runs), Path(folder), flags.at_once):
            results.append(result)
            if result.wrong or flags.runs == 1:
                print(result.plan, result.codes, *result.wrong, sep="\n    ", flush=True)
                for node, text in enumerate(result.stderr):
                    print(f"    --- node {node}:\n{text}", flush=True)
    print(table(results))
    return any(result.wrong for result in results)


if __name__ == "__main__":
    sys.exit(main())
