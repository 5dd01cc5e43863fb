"""`python -m tests.fsdp2_uses`: random uses of `fully_shard`, judged by plain models; failures are made small."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from tests.fsdp2_uses.generate import program_of
from tests.fsdp2_uses.report import report_of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fsdp2_uses", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to look")
    parser.add_argument("--seed", type=int, default=0, help="the first program's; the others' follow")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    end, seed, failures = time.monotonic() + options.seconds, options.seed, 0
    while time.monotonic() < end and failures < options.failures:
        if (report := report_of(program_of(seed))) is not None:
            failures += 1
            print(f"seed {seed}: {report}\n", flush=True)
        seed += 1
    print(f"{seed - options.seed} programs from seed {options.seed} on, {failures} with a difference")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
