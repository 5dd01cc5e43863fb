"""`python -m tests.dtensor_programs --seconds 60`: random programs on DTensors against plain torch."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import torch

from tests.dtensor_programs.generate import generate
from tests.dtensor_programs.program import Program, source
from tests.dtensor_programs.run import Verdict, run_program, run_programs
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
    started, tally = time.monotonic(), _Tally()
    with suppress(KeyboardInterrupt):
        for verdict in _verdicts(options.seed, options.seconds, options.programs):
            tally.add(verdict)
            if verdict.fault:
                _show(verdict, shrinks=not options.no_shrink)
            if tally.num_faults >= options.faults:
                break
    for function, count in tally.refused.most_common():
        print(f"refused {count:4d}  {function:28} {tally.examples[function][:160]}")
    rate = tally.num_programs / (time.monotonic() - started)
    print(
        f"{tally.num_programs} programs from seed {options.seed}, {rate:.0f}/s: "
        f"{tally.num_faults} faults, {tally.num_shaky} undecided"
    )
    return bool(tally.num_faults)


class _Tally:
    """How many programs have gone how; which functions were refused."""

    def __init__(self) -> None:
        self.num_programs = self.num_faults = self.num_shaky = 0
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, verdict: Verdict) -> None:
        self.num_programs += 1
        self.num_faults += bool(verdict.fault)
        self.num_shaky += verdict.is_shaky
        self.refused.update(verdict.refused.keys())
        self.examples.update(verdict.refused)


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


def _show(verdict: Verdict, *, shrinks: bool) -> None:
    print(f"===== seed {verdict.program.seed}: {verdict.fault}: {verdict.text}")
    if run_program(verdict.program).fault != verdict.fault:
        print("(only after other programs in the same world)")
    elif shrinks:
        verdict = shrunk(verdict)
        print(f"----- made small: {verdict.text}")
    print(source(verdict.program), flush=True)


if __name__ == "__main__":
    sys.exit(main())
