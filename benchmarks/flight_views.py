"""What looking costs: a step's summary in the job, and page, trace and watching over many ranks' records.

    python benchmarks/flight_views.py [--num-ranks 256]

Torch has no twin of any of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import disttrain
from disttrain.flight_recorder import FlightRecorder, StepSummaries, analyze, write_dump
from disttrain.flight_recorder.dump import dump_name
from disttrain.flight_recorder.live import look
from disttrain.flight_recorder.trace import write_trace
from disttrain.flight_recorder.view_page import as_html
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore
from tests.flight_job import job

NUM_STEPS = 200
CALLS_PER_STEP = 100


def fake_world(rank: int = 0, world_size: int = 1, store: HashStore | None = None) -> World:
    return World(store or HashStore(), rank, world_size, backend="fake", timeout_s=1.0, device=torch.device("cpu"))


def step_us() -> dict[str, float]:
    """Microseconds that `step` takes for each call recorded since the step before."""
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
    low, middle, high = statistics.quantiles(took_us)
    return {"fastest": min(took_us), "quartile_1": low, "median": middle, "quartile_3": high}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=256)
    num_ranks = parser.parse_args().num_ranks
    found: dict[str, object] = {
        "command": " ".join(sys.argv),
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        "step_us_per_call": step_us(),
        "num_ranks": num_ranks,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dumps = job(num_ranks, num_steps=50, stuck_rank=num_ranks // 3)
        for dump in dumps:
            write_dump(folder / dump_name(dump), dump)
        analysis = analyze(folder)
        start_s = time.perf_counter()
        page = as_html(analysis)
        drawn_s = time.perf_counter()
        write_trace(folder / "trace.json", analysis.dumps)
        found["num_records"] = sum(len(dump.records) for dump in dumps)
        found["page_s"], found["page_bytes"] = drawn_s - start_s, len(page)
        found["trace_s"], found["trace_bytes"] = time.perf_counter() - drawn_s, (folder / "trace.json").stat().st_size
    with tempfile.TemporaryDirectory() as name:
        found["watch_32_ranks_s"] = watch_s(32, Path(name))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
