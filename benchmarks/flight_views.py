"""What looking costs: a step's summary in the job, and page, trace and watching over many ranks' records.

    python benchmarks/flight_views.py [--num-ranks 256]

Torch has no counterpart of any of it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from harness import OURS, command_line, finish, row

import disttrain
from disttrain.flight_recorder import FlightRecorder, StepSummaries, analyze, write_dump
from disttrain.flight_recorder.dumps.dump import dump_name
from disttrain.flight_recorder.live.live import look
from disttrain.flight_recorder.views.page import as_html
from disttrain.flight_recorder.views.trace import write_trace
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore
from tests.flight_corpus.job import job

NUM_STEPS = 200
CALLS_PER_STEP = 100


def fake_world(rank: int = 0, world_size: int = 1, store: HashStore | None = None) -> World:
    return World(store or HashStore(), rank, world_size, backend="fake", timeout_s=1.0, device=torch.device("cpu"))


def step_us() -> list[float]:
    """Microseconds that `step` takes for each call recorded since the step before, of many steps."""
    tensor = torch.ones(4)
    took_us = []
    with entered_world(fake_world()) as world:
        recorder = FlightRecorder()
        recorder.attach(world)
        summaries = StepSummaries(recorder)
        for _ in range(NUM_STEPS):
            for _ in range(CALLS_PER_STEP):
                disttrain.all_reduce(tensor)
            start_s = time.perf_counter()
            summaries.step()
            took_us.append((time.perf_counter() - start_s) / CALLS_PER_STEP * 1e6)
        recorder.close()
    return took_us


def watch_s(num_ranks: int, folder: Path) -> float:
    """Seconds for one look at full rings of `num_ranks` ranks."""
    store = HashStore()
    for rank in range(num_ranks):
        with entered_world(fake_world(rank, num_ranks, store)) as world:
            recorder = FlightRecorder()
            recorder.attach(world, folder)
            for _ in range(2000):
                disttrain.all_reduce(torch.ones(4))
            world.recorder = None  # The world's end would remove the file.
    start_s = time.perf_counter()
    assert look(folder) is not None
    return time.perf_counter() - start_s


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--num-ranks", type=int, default=256)
    options = parser.parse_args()
    rows = [row("a step's summary, per call", "us", {OURS: step_us()})]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dumps = job(options.num_ranks, num_steps=50, stuck_rank=options.num_ranks // 3)
        for dump in dumps:
            write_dump(folder / dump_name(dump), dump)
        analysis = analyze(folder)
        start_s = time.perf_counter()
        page = as_html(analysis)
        drawn_s = time.perf_counter()
        write_trace(folder / "trace.json", analysis.dumps)
        written_s = time.perf_counter()
        trace_bytes = (folder / "trace.json").stat().st_size
    what = f"of {options.num_ranks} ranks, {sum(len(dump.records) for dump in dumps)} records"
    rows += [
        row(f"page {what}", "s", {OURS: [drawn_s - start_s]}),
        row(f"page {what}", "MB", {OURS: [len(page) / 1e6]}),
        row(f"trace {what}", "s", {OURS: [written_s - drawn_s]}),
        row(f"trace {what}", "MB", {OURS: [trace_bytes / 1e6]}),
    ]
    with tempfile.TemporaryDirectory() as name:
        rows.append(row("one look at 32 running ranks", "s", {OURS: [watch_s(32, Path(name))]}))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
