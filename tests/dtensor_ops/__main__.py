"""`python -m tests.dtensor_ops`: judge DTensor on torch's OpInfos, and write the page about it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.dtensor_ops.infos import all_infos
from tests.dtensor_ops.page import page, row
from tests.dtensor_ops.workers import judge_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dtensor_ops", description=__doc__)
    parser.add_argument("--op", action="append", default=[], help="only this operator (may be given again)")
    parser.add_argument("--write", type=Path, help="write the page here")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that judge")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one operator")
    options = parser.parse_args()
    places = [
        place
        for place, info in enumerate(all_infos())
        if not options.op or {info.name, f"{info.name} {info.variant_test_name}"} & set(options.op)
    ]
    started, outcomes = time.monotonic(), []
    for outcome in judge_all(places, options.workers, options.limit):
        outcomes.append(outcome)
        if outcome.verdict != "right":
            print(row(outcome), flush=True)
    print(f"{len(outcomes)} operators in {time.monotonic() - started:.0f} s", file=sys.stderr)
    if options.write and options.op:
        parser.error("--write wants all operators, not only those of --op")
    if options.write:
        options.write.write_text(page(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
