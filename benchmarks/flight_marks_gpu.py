"""What the flight recorder costs over NCCL: a small all_reduce without it, with records, and with marks on the GPU too.

    disttrain-launch --standalone --nproc-per-node 2 benchmarks/flight_marks_gpu.py [--json FILE]

Host time is what a call takes until it returns, the GPU being left behind; device time is the GPU's, over calls in a
row that are queued before the first begins. Of calls in such a row nearly all get one mark; with `all timed` each gets
both. Beside that: what each kind of mark costs, behind a kernel that does next to nothing. Rounds of all ways
alternate; medians of all rounds with their quartiles.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from harness import Row, command_line, finish, row

import disttrain
from disttrain.flight_recorder import FlightRecorder
from disttrain.flight_recorder.record.device import marks as device_marks
from disttrain.process_group import World
from disttrain.process_group.peers.cuda_driver import write_number

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


def recorded_us(
    world: World, tensor: torch.Tensor, recorder: FlightRecorder | None, between_ns: int
) -> tuple[float, float]:
    """Of an all_reduce with this recorder, which times one in `between_ns`."""
    device_marks.MIN_BETWEEN_NS = between_ns
    if recorder is not None:
        recorder.attach(world)
    found_us = round_us(lambda: disttrain.all_reduce(tensor))
    if recorder is not None:
        recorder.detach()
    return found_us


def marked_us(tensor: torch.Tensor, mark: Callable[[int], object]) -> tuple[float, float]:
    """Of a kernel and a mark behind it."""
    places = itertools.count()
    return round_us(lambda: (tensor.add_(1), mark(next(places))))


def rows(case: str, sides: dict[str, Callable[[], tuple[float, float]]]) -> list[Row]:
    taken: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(NUM_ROUNDS + 1):
        for side, call in sides.items():
            found_us = call()
            if number:  # The first round fills rings and makes events.
                taken[side].append(found_us)
    hosts, devices = ({side: [one[place] for one in own] for side, own in taken.items()} for place in range(2))
    return [row(f"{case}, host", "us", hosts), row(f"{case}, device", "us", devices)]


def main() -> None:
    options = command_line(__doc__).parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    disttrain.init_process_group(device_id=device)
    world = disttrain.current_world()
    world.recorder = None
    tensor = torch.ones(1024, device=device)
    recorders = {"bare": None, "records": FlightRecorder(marks_device=False), "with marks": FlightRecorder()}
    ways = {name: partial(recorded_us, world, tensor, recorder, 5_000_000) for name, recorder in recorders.items()}
    timed = FlightRecorder()
    ways["all timed"] = partial(recorded_us, world, tensor, timed, 0)
    found = rows("all_reduce of 4 KiB", ways)
    start_s = time.perf_counter()
    dump = timed.snapshot("benchmark")
    snapshot_s = time.perf_counter() - start_s
    assert all(record.device is not None and record.device.left_s is not None for record in dump.records)
    events, plain = ([torch.Event("cuda", enable_timing=on) for _ in range(NUM_CALLS + 1)] for on in (True, False))
    number, stream = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.cuda.current_stream()
    marks: dict[str, Callable[[int], object]] = {
        "no mark": lambda _: None,
        "event with time": lambda place: events[place].record(),
        "event without": lambda place: plain[place].record(),
        "number written": lambda place: write_number(stream, number.data_ptr(), place),
    }
    found += rows("kernel and mark", {name: partial(marked_us, tensor, mark) for name, mark in marks.items()})
    found.append(row(f"dump of {len(dump.records)} records with marks", "ms", {"ours": [snapshot_s * 1e3]}))
    if world.rank == 0:
        finish(found, options.json, gpu=torch.cuda.get_device_name())
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
