"""`python -m tests.dtensor_rules`: judge what DTensor's rules say of torch's OpInfos, one mesh axis at a time."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence

from tests.dtensor_ops.infos import all_infos
from tests.dtensor_rules.summary import Summary, start_worker, work


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dtensor_rules", description=__doc__)
    parser.add_argument("--op", action="append", default=[], help="only this operator (may be given again)")
    parser.add_argument("--missed", type=int, default=0, help="try so many signatures per call that no rule offers")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that judge")
    options = parser.parse_args(arguments)
    places = [place for place, info in enumerate(all_infos()) if not options.op or info.name in options.op]
    total = Summary()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, start_worker) as pool:
        tasks = [(place, options.missed) for place in places]
        for number, summary in enumerate(pool.imap_unordered(work, tasks), 1):
            if number % 50 == 0:
                print(f"{number} of {len(tasks)}", file=sys.stderr, flush=True)
            for line in summary.wrong:
                print(line, flush=True)
            total.add(summary)
    print(total)
    return 1 if total.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
