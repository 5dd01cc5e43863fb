"""`python -m tests.dtensor_ops`: judges DTensor on torch's OpInfos: its values, for the page about it, or its rules."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.dtensor_ops import judge
from tests.dtensor_ops.infos import all_infos, indices_of
from tests.dtensor_ops.page import page, row
from tests.dtensor_ops.rules import summary
from tests.dtensor_ops.workers import Judging, judge_all

VALUES = Judging(judge.judge, judge.hanging)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dtensor_ops", description=__doc__)
    parser.add_argument("--op", action="append", default=[], help="only this operator (may be given again)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that judge")
    parser.add_argument("--limit", type=float, help="seconds for one operator (90, or 600 with --rules)")
    parser.add_argument("--write", type=Path, help="write the page about all operators here")
    parser.add_argument("--rules", action="store_true", help="judge each rule, one mesh axis at a time")
    parser.add_argument("--missed", type=int, default=0, help="try so many signatures per call that no rule offers")
    options = parser.parse_args(arguments)
    if options.write and (options.op or options.rules):
        parser.error("--write takes the values of all operators: neither --op nor --rules")
    indices = indices_of(options.op) if options.op else range(len(all_infos()))
    judges = _judge_rules if options.rules else _judge_values
    return judges(indices, options)


def _judge_values(indices: Sequence[int], options: argparse.Namespace) -> int:
    started_s, outcomes = time.monotonic(), []
    for outcome in judge_all(VALUES, indices, options.workers, options.limit or 90.0):
        outcomes.append(outcome)
        if outcome.verdict != "right":
            print(row(outcome), flush=True)
    print(f"{len(outcomes)} operators in {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    if options.write:
        options.write.write_text(page(outcomes))
    return 0


def _judge_rules(indices: Sequence[int], options: argparse.Namespace) -> int:
    total = summary.Summary()
    judging = Judging(partial(summary.judge_new, num_tried=options.missed), summary.hanging, summary.start)
    for number, result in enumerate(judge_all(judging, indices, options.workers, options.limit or 600.0), 1):
        if number % 50 == 0:
            print(f"{number} of {len(indices)}", file=sys.stderr, flush=True)
        for line in result.wrong:
            print(line, flush=True)
        total.add(result)
    print(total)
    return 1 if total.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
