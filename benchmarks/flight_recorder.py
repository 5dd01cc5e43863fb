"""What the flight recorder costs: a call under `fake` with and without it, and the analyzer over many ranks' dumps.

    python benchmarks/flight_recorder.py [--num-ranks 1000] [--json FILE]

A call's cost is the difference to the same call without an observer, in the same run, rounds interleaved; the median of
all rounds, with the quartiles. torch has no twin of it: its recorder sits in C++, inside NCCL's transport.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import disttrain
from disttrain.flight_recorder import FlightRecorder, analyze, write_dump
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore

NUM_ROUNDS = 40
NUM_CALLS = 2000


def under(depth: int, body: Callable[[], None]) -> None:
    """Call `body` below `depth` more Python frames, as a model's modules do."""
    if depth:
        under(depth - 1, body)
    else:
        body()


def round_us(tensor: torch.Tensor) -> float:
    """Microseconds per all_reduce, each from a frame of its own."""

    def call() -> None:
        disttrain.all_reduce(tensor)

    start_s = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    return (time.perf_counter() - start_s) / NUM_CALLS * 1e6


def cost_us(world: World, recorder: FlightRecorder, depth: int) -> dict[str, float]:
    """What `recorder` adds to a call, `depth` frames deep."""
    tensor = torch.ones(4)
    bare_us: list[float] = []
    recorded_us: list[float] = []
    for _ in range(NUM_ROUNDS):
        under(depth, lambda: bare_us.append(round_us(tensor)))
        recorder.attach(world)
        under(depth, lambda: recorded_us.append(round_us(tensor)))
        recorder.detach()
    added_us = [recorded - bare for recorded, bare in zip(recorded_us, bare_us, strict=True)]
    lower, median, upper = statistics.quantiles(added_us, n=4)
    return {"bare_us": statistics.median(bare_us), "added_us": median, "lower_us": lower, "upper_us": upper}


def memory_bytes(world: World, num_sites: int) -> int:
    """Memory of a full ring, slots and all that Python holds, after calls of `num_sites` shapes."""
    tensors = [torch.ones(1 + number % num_sites) for number in range(2 * NUM_CALLS)]
    tracemalloc.start()
    recorder = FlightRecorder()
    recorder.attach(world)
    under(20, lambda: [disttrain.all_reduce(tensor) for tensor in tensors] and None)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    recorder.detach()
    return size + len(recorder.ring.memory)


def new_site_us(world: World) -> float:
    """Microseconds that a call takes, more than the same again, when it is the first of its shape."""
    tensors = [torch.ones(size) for size in range(1, NUM_CALLS)]
    recorder = FlightRecorder()
    recorder.attach(world)
    taken_s = []
    for _ in range(2):
        start_s = time.perf_counter()
        for tensor in tensors:
            disttrain.all_reduce(tensor)
        taken_s.append(time.perf_counter() - start_s)
    recorder.detach()
    return (taken_s[0] - taken_s[1]) / len(tensors) * 1e6


def analyzer(world: World, num_ranks: int) -> dict[str, float]:
    """Seconds to dump, and to analyze the dumps of `num_ranks` ranks with a full ring each, one of them absent."""
    recorder = FlightRecorder()
    recorder.attach(world)
    for _ in range(1000):
        disttrain.all_reduce(torch.ones(4))
        disttrain.broadcast(torch.ones(8), 0)
    start_s = time.perf_counter()
    dump = recorder.snapshot("benchmark")
    with tempfile.TemporaryDirectory() as folder:
        write_dump(Path(folder) / "first.flight", dump)
        dump_s = time.perf_counter() - start_s
        for rank in range(num_ranks):
            write_dump(Path(folder) / f"{rank}.flight", replace(dump, rank=rank, world_size=num_ranks))
        (Path(folder) / "first.flight").unlink()
        start_s = time.perf_counter()
        analysis = analyze(Path(folder))
        analyze_s = time.perf_counter() - start_s
    assert len(analysis.dumps) == num_ranks
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"num_ranks": num_ranks, "dump_s": dump_s, "analyze_s": analyze_s, "peak_bytes": peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-ranks", type=int, default=100, help="ranks whose dumps are analyzed (default 100)")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    world = World(HashStore(), 0, 8, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    results: dict[str, object] = {
        "command": " ".join(sys.argv),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "versions": f"disttrain {disttrain.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }
    with entered_world(world):
        for num_frames in (0, 4, 8, 16):
            for depth in (0, 20):
                found = cost_us(world, FlightRecorder(num_frames=num_frames), depth)
                results[f"all_reduce, {num_frames} frames, {depth} deep"] = found
                print(
                    f"{num_frames:2} frames kept, {depth:2} deep: +{found['added_us']:.2f} us "
                    f"[{found['lower_us']:.2f}, {found['upper_us']:.2f}] on {found['bare_us']:.2f} us"
                )
        for num_sites in (1, NUM_CALLS):
            size = results[f"bytes, {num_sites} call sites"] = memory_bytes(world, num_sites)
            print(f"a full ring of 2000 records of {num_sites} call sites: {size >> 10} KiB")
        results["new_site_us"] = new_site_us(world)
        print(f"a call site that is new: +{results['new_site_us']:.1f} us, once")
        scale = results["analyzer"] = analyzer(world, options.num_ranks)
        print(
            f"dump {scale['dump_s'] * 1e3:.1f} ms; analyze {options.num_ranks} ranks x 2000 records "
            f"{scale['analyze_s']:.2f} s, peak {scale['peak_bytes'] / 2**20:.0f} MiB with torch"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
