"""Bus bandwidth of large collectives and host time of small ones over NCCL, ours and torch's, in turn, in one run.

    disttrain-launch --standalone --nproc-per-node gpu benchmarks/collectives_gpu.py [--gib 1] [--out results.json]

Bus bandwidth is what nccl-tests call so: the bytes that each link carries over the time of the slowest rank; for
all_reduce 2 (p - 1) / p of the tensor's size, for the others (p - 1) / p of the whole's, with p ranks
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Host time is what a call takes until it returns,
the GPU being left behind.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from harness import asked, keep

import disttrain

NUM_ROUNDS = 15
CALLS_PER_ROUND = 5
NUM_SMALL_ROUNDS = 200
SMALL_CALLS = 50
Pair = tuple[Callable[[], object], Callable[[], object]]


def large_cases(num_elements: int, num_ranks: int) -> dict[str, tuple[float, Pair]]:
    """Name -> (bytes on the bus per call, our call, torch's call); bfloat16."""
    theirs = torch.distributed
    # Newer torch warns on each call of the old names.
    their_gather = getattr(theirs, "all_gather_single", theirs.all_gather_into_tensor)
    their_scatter = getattr(theirs, "reduce_scatter_single", theirs.reduce_scatter_tensor)
    whole = torch.ones(num_elements, device="cuda", dtype=torch.bfloat16)
    part = torch.ones(num_elements // num_ranks, device="cuda", dtype=torch.bfloat16)
    share_bytes = whole.nbytes * (num_ranks - 1) / num_ranks
    # An average, so that values stay what they are however often they are reduced.
    mean, their_mean = disttrain.ReduceOp.AVG, theirs.ReduceOp.AVG
    return {
        "all_reduce": (
            2 * share_bytes,
            (lambda: disttrain.all_reduce(whole, mean), lambda: theirs.all_reduce(whole, their_mean)),
        ),
        "all_gather_into_tensor": (
            share_bytes,
            (lambda: disttrain.all_gather_into_tensor(whole, part), lambda: their_gather(whole, part)),
        ),
        "reduce_scatter_tensor": (
            share_bytes,
            (
                lambda: disttrain.reduce_scatter_tensor(part, whole, mean),
                lambda: their_scatter(part, whole, their_mean),
            ),
        ),
    }


def small_cases() -> dict[str, Pair]:
    theirs = torch.distributed
    small = torch.ones(1024, device="cuda")
    return {
        "all_reduce of 4 KiB": (lambda: disttrain.all_reduce(small), lambda: theirs.all_reduce(small)),
        "all_reduce of 4 KiB, async and wait": (
            lambda: waited(disttrain.all_reduce(small, async_op=True)),
            lambda: theirs.all_reduce(small, async_op=True).wait(),
        ),
    }


def waited(work: disttrain.Work | None) -> None:
    assert work is not None
    work.wait()


def device_s(call: Callable[[], object]) -> float:
    """Seconds of one call on the GPU, over CALLS_PER_ROUND in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(CALLS_PER_ROUND):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / CALLS_PER_ROUND


def host_s(call: Callable[[], object]) -> float:
    """Seconds until a call returns, over SMALL_CALLS in a row, too few to fill the GPU's queue."""
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(SMALL_CALLS):
        call()
    return (time.perf_counter() - begin_s) / SMALL_CALLS


def alternated(pair: Pair, num_rounds: int, measure: Callable[[Callable[[], object]], float]) -> dict[str, list[float]]:
    """Seconds per round of ours and torch's, each round's the slowest rank's; who begins takes turns."""
    for call in pair * 5:
        call()
    taken = torch.empty(num_rounds, 2)
    for number in range(num_rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            taken[number, side] = measure(pair[side])
    slowest = taken.cuda()
    disttrain.all_reduce(slowest, disttrain.ReduceOp.MAX)
    return dict(zip(("ours", "torch"), slowest.T.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the whole tensor")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    disttrain.init_process_group(device_id=device)
    num_ranks = disttrain.get_world_size()
    torch.distributed.init_process_group("nccl", device_id=device)
    results: dict[str, Any] = {
        "command": asked(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "versions": {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))},
        "machine": f"{num_ranks} x {torch.cuda.get_device_name()}",
    }
    num_elements = int(options.gib * (1 << 30)) // 2 // num_ranks * num_ranks
    for name, (bus_bytes, pair) in large_cases(num_elements, num_ranks).items():
        rates = {
            side: [bus_bytes / s / 1e9 for s in times] for side, times in alternated(pair, NUM_ROUNDS, device_s).items()
        }
        report(results, f"{name}, {options.gib:g} GiB", "GB/s", rates)
    for name, pair in small_cases().items():
        times_us = {
            side: [s * 1e6 for s in times] for side, times in alternated(pair, NUM_SMALL_ROUNDS, host_s).items()
        }
        report(results, f"{name}, host", "us", times_us)
    if disttrain.get_rank() == 0 and options.out is not None:
        keep(results, options.out)
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


def report(results: dict[str, Any], name: str, unit: str, sides: dict[str, list[float]]) -> None:
    found: dict[str, Any] = {"unit": unit}
    for side, values in sides.items():
        lower, median, upper = statistics.quantiles(values, n=4)
        found[side] = {
            "median": median,
            "lower": lower,
            "upper": upper,
            "best": max(values) if unit == "GB/s" else min(values),
        }
    found["ratio"] = found["ours"]["median"] / found["torch"]["median"]
    results[name] = found
    if disttrain.get_rank() == 0:
        shown = "   ".join(
            f"{side} {value['median']:.1f} {unit} [{value['lower']:.1f}, {value['upper']:.1f}]"
            for side, value in found.items()
            if isinstance(value, dict)
        )
        print(f"{name:45} {shown}   ratio {found['ratio']:.3f}", flush=True)


if __name__ == "__main__":
    main()
