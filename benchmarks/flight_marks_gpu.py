"""What the flight recorder costs over NCCL: a small all_reduce without it, with records, and with marks on the GPU too.

    disttrain-launch --standalone --nproc-per-node 2 benchmarks/flight_marks_gpu.py [--json FILE]

Host time is what a call takes until it returns, the GPU being left behind; device time is the GPU's, over calls in a
row that are queued before the first begins. Rounds of the three alternate; medians of all rounds with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import disttrain
from disttrain.flight_recorder import FlightRecorder

NUM_ROUNDS = 60
NUM_CALLS = 100
HOLD_CYCLES = 20_000_000
"""For which the GPU is kept busy while calls are queued: some 10 ms."""


def round_us(tensor: torch.Tensor) -> tuple[float, float]:
    """Microseconds per all_reduce of the host and of the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    disttrain.all_reduce(tensor)
    torch.cuda.synchronize()
    torch.cuda._sleep(HOLD_CYCLES)
    begin.record()
    start_s = time.perf_counter()
    for _ in range(NUM_CALLS):
        disttrain.all_reduce(tensor)
    host_s = time.perf_counter() - start_s
    end.record()
    torch.cuda.synchronize()
    return host_s / NUM_CALLS * 1e6, begin.elapsed_time(end) / NUM_CALLS * 1e3


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
    }
    tensor = torch.ones(1024, device=device)
    world.recorder = None
    taken_us: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(NUM_ROUNDS + 1):
        for name, recorder in ways.items():
            if recorder is not None:
                recorder.attach(world)
            found_us = round_us(tensor)
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
    for name, rounds in taken_us.items():
        for what, times_us in zip(("host", "device"), zip(*rounds, strict=True), strict=True):
            lower, median, upper = statistics.quantiles(times_us, n=4)
            results[f"{name}, {what}"] = {"median_us": median, "lower_us": lower, "upper_us": upper}
            if world.rank == 0:
                print(f"{name:18} {what:7} {median:6.2f} us [{lower:.2f}, {upper:.2f}]")
    marked = ways["records and marks"]
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
