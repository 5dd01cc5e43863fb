"""What the flight recorder costs over NCCL: a small all_reduce without it, with records, and with marks on the GPU too.

    disttrain-launch --standalone --nproc-per-node 2 benchmarks/flight_marks_gpu.py [--json FILE]

Host time is what a call takes until it returns, the GPU being left behind; device time is the GPU's, over calls in a
row that are queued before the first begins. Of calls in such a row nearly all get one mark; with `all timed` each gets
both. Beside that: what each kind of mark costs, behind a kernel that does next to nothing. Rounds of all ways
alternate; medians of all rounds with their quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import disttrain
from disttrain.flight_recorder import FlightRecorder, device_marks
from disttrain.process_group._cuda import write_number

NUM_ROUNDS = 60
NUM_CALLS = 100
HOLD_CYCLES = 20_000_000
"""For which the GPU is kept busy while calls are queued: some 10 ms."""


def round_us(call: Callable[[], object]) -> tuple[float, float]:
    """Microseconds per call of the host and of the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(HOLD_CYCLES)
    begin.record()
    start_s = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    host_s = time.perf_counter() - start_s
    end.record()
    torch.cuda.synchronize()
    return host_s / NUM_CALLS * 1e6, begin.elapsed_time(end) / NUM_CALLS * 1e3


def kinds_us(tensor: torch.Tensor) -> dict[str, list[tuple[float, float]]]:
    """Of a kernel alone, and with each kind of mark behind it."""
    timed = [torch.Event("cuda", enable_timing=True) for _ in range(NUM_CALLS + 1)]
    plain = [torch.Event("cuda") for _ in range(NUM_CALLS + 1)]
    number = torch.zeros(1, dtype=torch.int32).pin_memory()
    stream = torch.cuda.current_stream()
    marks: dict[str, Callable[[int], object]] = {
        "kernel": lambda place: None,
        "kernel, event with time": lambda place: timed[place].record(),
        "kernel, event without": lambda place: plain[place].record(),
        "kernel, number written": lambda place: write_number(stream, number.data_ptr(), place),
    }
    taken_us: dict[str, list[tuple[float, float]]] = {name: [] for name in marks}
    for _ in range(NUM_ROUNDS):
        for name, mark in marks.items():
            places = itertools.count()
            taken_us[name].append(round_us(lambda mark=mark, places=places: (tensor.add_(1), mark(next(places)))))
    return taken_us


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    disttrain.init_process_group(device_id=device)
    world = disttrain.current_world()
    ways: dict[str, FlightRecorder | None] = {
        "bare": None,
        "records": FlightRecorder(marks_device=False),
        "records and marks": FlightRecorder(),
        "all timed": FlightRecorder(),
    }
    tensor = torch.ones(1024, device=device)
    world.recorder = None
    between_ns = device_marks.MIN_BETWEEN_NS
    taken_us: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(NUM_ROUNDS + 1):
        for name, recorder in ways.items():
            if recorder is not None:
                recorder.attach(world)
            device_marks.MIN_BETWEEN_NS = 0 if name == "all timed" else between_ns
            found_us = round_us(lambda: disttrain.all_reduce(tensor))
            if recorder is not None:
                recorder.detach()
            if number:  # The first fills rings and makes events.
                taken_us[name].append(found_us)
    results: dict[str, object] = {
        "command": " ".join(["disttrain-launch", "--standalone", "--nproc-per-node", str(world.world_size), *sys.argv]),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "versions": {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))},
        "machine": f"{world.world_size} x {torch.cuda.get_device_name()}",
    }
    for name, rounds in (taken_us | kinds_us(tensor)).items():
        for what, times_us in zip(("host", "device"), zip(*rounds, strict=True), strict=True):
            lower, median, upper = statistics.quantiles(times_us, n=4)
            results[f"{name}, {what}"] = {"median_us": median, "lower_us": lower, "upper_us": upper}
            if world.rank == 0:
                print(f"{name:24} {what:7} {median:6.2f} us [{lower:.2f}, {upper:.2f}]")
    marked = ways["all timed"]
    assert marked is not None
    start_s = time.perf_counter()
    dump = marked.snapshot("benchmark")
    results["snapshot_ms"] = (time.perf_counter() - start_s) * 1e3
    assert all(record.device is not None and record.device.left_s is not None for record in dump.records)
    if world.rank == 0:
        print(f"a snapshot of {len(dump.records)} records with marks: {results['snapshot_ms']:.1f} ms")
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
