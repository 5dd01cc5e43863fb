"""What the flight recorder costs: a call under `fake` with and without it, and the analyzer over many ranks' dumps.

    python benchmarks/flight_recorder.py [--num-ranks 1000] [--json FILE]

A call's cost is the difference to the same call without an observer, in the same run, rounds interleaved; the median of
all rounds, with the quartiles. torch has no counterpart: its recorder sits in C++, inside NCCL's transport.
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import torch
from harness import OURS, command_line, finish, row

import disttrain
from disttrain.flight_recorder import FlightRecorder, write_dump
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
    """Microseconds of CPU time per all_reduce, each from a frame of its own."""

    def call() -> None:
        disttrain.all_reduce(tensor)

    start_s = time.thread_time()
    for _ in range(NUM_CALLS):
        call()
    return (time.thread_time() - start_s) / NUM_CALLS * 1e6


def costs_us(world: World, recorder: FlightRecorder, depth: int) -> dict[str, list[float]]:
    """What `recorder` adds to a call, `depth` frames deep, and what the call takes without it."""
    tensor = torch.ones(4)
    bare_us: list[float] = []
    recorded_us: list[float] = []
    for _ in range(NUM_ROUNDS):
        under(depth, lambda: bare_us.append(round_us(tensor)))
        recorder.attach(world)
        under(depth, lambda: recorded_us.append(round_us(tensor)))
        recorder.detach()
    added_us = [recorded - bare for recorded, bare in zip(recorded_us, bare_us, strict=True)]
    return {OURS: added_us, "the call itself": bare_us}


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
    """Microseconds of CPU time that a call takes, more than the same again, when it is the first of its shape."""
    tensors = [torch.ones(size) for size in range(1, NUM_CALLS)]
    recorder = FlightRecorder()
    recorder.attach(world)
    taken_s = []
    for _ in range(2):
        start_s = time.thread_time()
        for tensor in tensors:
            disttrain.all_reduce(tensor)
        taken_s.append(time.thread_time() - start_s)
    recorder.detach()
    return (taken_s[0] - taken_s[1]) / len(tensors) * 1e6


def dump_s(world: World) -> float:
    """Seconds to write a full ring to a file."""
    recorder = FlightRecorder()
    recorder.attach(world)
    for _ in range(NUM_CALLS // 2):
        disttrain.all_reduce(torch.ones(4))
        disttrain.broadcast(torch.ones(8), 0)
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        write_dump(Path(folder) / "0.flight", recorder.snapshot("benchmark"))
        taken_s = time.perf_counter() - start_s
    recorder.detach()
    return taken_s


def main() -> None:
    options = command_line(__doc__).parse_args()
    world = World(HashStore(), 0, 8, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    rows = []
    with entered_world(world):
        for num_frames in (0, 4, 8, 16):
            for depth in (0, 20):
                taken = costs_us(world, FlightRecorder(num_frames=num_frames), depth)
                rows.append(row(f"added to a call, {num_frames} frames kept, {depth} deep", "us of CPU", taken))
        for num_sites in (1, NUM_CALLS):
            case = f"a full ring, {num_sites} call sites"
            rows.append(row(case, "KiB", {OURS: [memory_bytes(world, num_sites) / 1024]}))
        rows.append(row("added to a call at a new site, once", "us of CPU", {OURS: [new_site_us(world)]}))
        rows.append(row("a dump of a full ring", "ms", {OURS: [dump_s(world) for _ in range(5)]}, 1e3))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
