"""How fast `disttrain-flight` is: over many ranks with full rings, and to say something about two ranks.

    python benchmarks/flight_analyzer.py [--num-ranks 1000] [--json FILE]

The command runs as users run it, in a process of its own; time is from its start to its end, memory its peak. The
dumps are made from one: a loop over 40 call sites in three groups, the last collective with one rank absent, or with
all of them there, when every wait of every rank is looked at for a straggler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import OURS, command_line, finish, row

from disttrain.flight_recorder.dumps.dump import Dump, dump_name, write_dump
from disttrain.flight_recorder.record.record import CallSite, Frame, GroupProgress, Record, State, ThreadStack

NUM_RECORDS = 2000
NUM_SITES = 40
NUM_FRAMES = 8
NUM_STARTS = 10
NOW_S = 1_700_000_000.0


def records(ranks: tuple[int, ...]) -> list[Record]:
    """A full ring."""
    sites = []
    for number in range(NUM_SITES):
        stack = tuple(Frame("/job/model.py", 10 * number + depth, f"layer_{depth}") for depth in range(NUM_FRAMES))
        group = f"group {number % 3}"
        operation = "all_reduce" if number % 2 else "all_gather_into_tensor"
        sites.append(CallSite(group, ranks, operation, ((8, number),), ((8, number),), ("bfloat16",), None, stack))
    found = []
    last = dict.fromkeys(range(3), 0)
    for number in range(NUM_RECORDS):
        which = number % NUM_SITES
        last[which % 3] += 1
        began_s = NOW_S - (NUM_RECORDS - number) * 0.01
        found.append(Record(sites[which], last[which % 3], State.COMPLETED, began_s, began_s + 0.005))
    return found


def write_all(folder: Path, num_ranks: int, *, hangs: bool) -> None:
    """A dump for each rank; where it `hangs`, rank 1 has not come to the last collective."""
    ranks = tuple(range(num_ranks))
    whole = records(ranks)
    waiting = whole[-1]._replace(state=State.ENQUEUED, completed_s=None)
    for rank in ranks:
        is_absent = hangs and rank == 1
        own = whole[:-1] if is_absent else [*whole[:-1], waiting] if hangs else whole
        last: dict[str, int] = {}
        for record in own:
            last[record.site.group_name] = record.sequence
        dump = Dump(
            rank=rank,
            world_size=num_ranks,
            job="job",
            host=f"node{rank // 8}",
            pid=rank,
            started_s=NOW_S - 100,
            dumped_s=NOW_S + 20,
            reason="rank 0 has waited for 20 s",
            versions={},
            package="/site/disttrain/",
            libraries=("/site/",),
            groups=tuple(GroupProgress(name, ranks, number) for name, number in last.items()),
            threads=(ThreadStack("MainThread", True, _stack(is_absent)),),
            records=tuple(replaced(own, rank)),
        )
        write_dump(folder / dump_name(dump), dump)


def replaced(own: list[Record], rank: int) -> list[Record]:
    """The same at other times, since clocks differ."""
    shift_s = rank * 1e-4
    return [
        record._replace(
            enqueued_s=record.enqueued_s + shift_s,
            completed_s=None if record.completed_s is None else record.completed_s + shift_s,
        )
        for record in own
    ]


def _stack(is_absent: bool) -> tuple[Frame, ...]:
    inside = Frame("/site/disttrain/process_group/door.py", 66, "issue")
    return (Frame("/job/data.py", 7, "load"),) if is_absent else (inside, Frame("/job/model.py", 1, "layer"))


def run(folder: Path) -> dict[str, float]:
    """Seconds, processor seconds and peak bytes of the command."""
    start_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "disttrain.flight_recorder.cli", folder, "--json"], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start_s
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 10), process.returncode
    return {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--num-ranks", type=int, default=100, help="ranks whose dumps are analyzed (default 100)")
    options = parser.parse_args()
    rows = []
    cases = (("hang", options.num_ranks, True), ("no hang", options.num_ranks, False), ("start", 2, True))
    for name, num_ranks, hangs in cases:
        with tempfile.TemporaryDirectory() as folder:
            write_all(Path(folder), num_ranks, hangs=hangs)
            taken = [run(Path(folder)) for _ in range(NUM_STARTS if name == "start" else 1)]
        case = f"{name}, {num_ranks} ranks x {NUM_RECORDS} records"
        rows.append(row(case, "s", {OURS: [one["wall_s"] for one in taken]}))
        rows.append(row(case, "s of CPU", {OURS: [one["cpu_s"] for one in taken]}))
        rows.append(row(case, "MiB at most", {OURS: [one["peak_bytes"] for one in taken]}, 2**-20))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
