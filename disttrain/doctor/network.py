"""Measurements of ranks together: each pair of nodes, then all at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TypeVar

import torch

from disttrain.doctor.findings import Finding, State
from disttrain.doctor.pairs import Measured, Pair, rounds
from disttrain.errors import DisttrainError
from disttrain.process_group import ProcessGroup, World, all_reduce, barrier, new_group, recv, send

PAIR_BYTES = 32 << 20
WHOLE_BYTES = 64 << 20
NUM_PINGS = 20
NUM_TURNS = 3
TIMEOUT_S = 30.0

Result = TypeVar("Result")


def measure_pairs(world: World, leaders: Sequence[int]) -> dict[Pair, Measured]:
    """Measures pairs of nodes, on the first rank of each; `leaders` are the first ranks of the nodes.

    Collective: every rank of the world. A pair that cannot talk takes `TIMEOUT_S`, and no other pair with it.
    """
    results: dict[Pair, Measured] = {}
    for number, pairs in enumerate(rounds(len(leaders))):
        for first, second in pairs:
            ranks = [leaders[first], leaders[second]]
            group = new_group(ranks, timeout=TIMEOUT_S, backend="gloo", sort_ranks=False)
            if world.rank not in ranks:
                continue
            assert isinstance(group, ProcessGroup)
            measured = _attempt(group)
            if world.rank == ranks[0]:
                results[first, second] = measured
        # The next round begins when all have left this one, or it would measure two pairs on a link.
        world.store.barrier(f"round/{number}", world.world_size, 4 * TIMEOUT_S)
    return results


def measure_whole(world: World) -> list[Finding]:
    """An all-reduce over all ranks, on the CPU and on GPUs. Collective: every rank of the world."""
    if world.world_size == 1:
        return []
    devices = [torch.device("cpu"), *([world.device] if world.device.type != "cpu" else [])]
    return [_all_reduced(world, device) for device in devices]


def _attempt(group: ProcessGroup) -> Measured:
    try:
        barrier(group)
        this_rank, other = group.ranks if group.group_rank == 0 else reversed(group.ranks)
        small, large = torch.zeros(1, dtype=torch.uint8), torch.zeros(PAIR_BYTES, dtype=torch.uint8)
        is_first = this_rank == group.members[0]
        latency_s = statistics.median(_to_and_fro(small, other, group, is_first) for _ in range(NUM_PINGS)) / 2
        turn_s = min(_to_and_fro(large, other, group, is_first) for _ in range(NUM_TURNS))
        return Measured(2 * PAIR_BYTES / turn_s, latency_s)
    except DisttrainError as error:
        return Measured(problem=error.problem)


def _to_and_fro(tensor: torch.Tensor, other: int, group: ProcessGroup, is_first: bool) -> float:
    began_s = time.perf_counter()
    for turn in (send, recv) if is_first else (recv, send):
        turn(tensor, other, group)
    return time.perf_counter() - began_s


def _all_reduced(world: World, device: torch.device) -> Finding:
    name = "all-reduce of GPUs" if device.type != "cpu" else "all-reduce"
    try:
        group = new_group(timeout=2 * TIMEOUT_S)
        assert isinstance(group, ProcessGroup)
        tensor = torch.ones(WHOLE_BYTES // 4, device=device)
        all_reduce(tensor, group=group)
        expected = float(world.world_size)
        wrong = tensor[tensor != expected]
        problem = f"gave {wrong[0].item():g} instead of {expected:g}" if wrong.numel() else ""
        durations_s = []
        for _ in range(NUM_TURNS):
            barrier(group)
            began_s = time.perf_counter()
            all_reduce(tensor, group=group)
            # Reading a value waits for the GPU.
            tensor[0].item()
            durations_s.append(time.perf_counter() - began_s)
    except DisttrainError as error:
        return Finding(name, State.BAD, error.problem, error.remedy or "See the log of each rank.")
    except RuntimeError as error:  # of the device: out of memory, or worse
        return Finding(name, State.BAD, str(error).splitlines()[0], "See the log of each rank, and nvidia-smi.")
    if problem:
        return Finding(name, State.BAD, f"rank {world.rank}: it {problem}", _WRONG)
    # Each rank sends and receives this much in a ring; NCCL's tests call it bus bandwidth.
    moved = 2 * (world.world_size - 1) / world.world_size * WHOLE_BYTES
    return Finding(name, State.GOOD, f"{moved / min(durations_s) / 1e9:.3g} GB/s on {world.world_size} ranks")


_WRONG = "A sum is wrong: don't train here; look for memory errors (nvidia-smi -q -d ECC, dmesg)."
