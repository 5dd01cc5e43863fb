"""`python -m tests.dtensor_programs --seconds 60`: random programs on DTensors against plain torch."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch

from tests.dtensor_programs.generate import generate
from tests.dtensor_programs.program import Program, source
from tests.dtensor_programs.run import Verdict, run_programs
from tests.dtensor_programs.shrink import shrunk

BATCH = 60
"""Programs generated at a time; those of one world's size run in one world."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dtensor_programs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--programs", type=int, default=sys.maxsize, help="how many at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next have the next numbers")
    parser.add_argument("--no-shrink", action="store_true", help="print programs that fail as they are")
    parser.add_argument("--faults", type=int, default=sys.maxsize, help="stop after so many")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    started, verdicts = time.monotonic(), _verdicts(options.seed, options.seconds, options.programs)
    num_programs, num_shaky, num_faults = 0, 0, 0
    refused: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for verdict in verdicts:
        num_programs += 1
        num_shaky += verdict.is_shaky
        refused.update(verdict.refused.keys())
        examples.update(verdict.refused)
        if verdict.fault:
            num_faults += 1
            _show(verdict if options.no_shrink else shrunk(verdict), verdict)
            if num_faults >= options.faults:
                break
    for function, count in refused.most_common():
        print(f"refused {count:4d}  {function:28} {examples[function][:160]}")
    rate = num_programs / (time.monotonic() - started)
    print(f"{num_programs} programs from seed {options.seed}, {rate:.0f}/s: {num_faults} faults, {num_shaky} undecided")
    return bool(num_faults)


def _verdicts(seed: int, seconds: float, num_programs: int) -> Iterator[Verdict]:
    deadline, last = time.monotonic() + seconds, seed + num_programs
    while time.monotonic() < deadline and seed < last:
        programs = [generate(own) for own in range(seed, min(seed + BATCH, last))]
        seed += BATCH
        by_size: dict[int, list[Program]] = {}
        for program in programs:
            by_size.setdefault(program.world_size, []).append(program)
        for alike in by_size.values():
            yield from run_programs(alike)


def _show(verdict: Verdict, first: Verdict) -> None:
    print(f"===== seed {first.program.seed}: {verdict.fault}: {verdict.text}")
    print(source(verdict.program).split("\n\n\n")[1])
    print(f"    on {verdict.program.mesh_shape}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
