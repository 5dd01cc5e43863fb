"""Plays random programs of views (`programs`) and prints those that go wrong, made small.

python -m tests.view_programs --seconds 60
python -m tests.view_programs --seed 17
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import count

from tests.view_programs.programs import faults_of, program_of, shrunk


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.view_programs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    num_programs, num_wrong = 0, 0
    for seed in [options.seed] if options.seed is not None else count(options.first):
        if time.monotonic() > end:
            break
        program = program_of(seed)
        num_programs += 1
        if faults_of(program):
            num_wrong += 1
            smaller = shrunk(program)
            print(smaller, *faults_of(smaller), sep="\n", flush=True)
    print(f"{num_programs} programs, {num_wrong} of them go wrong")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
