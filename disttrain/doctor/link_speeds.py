"""Ranks of two nodes measure what a job has between them: over the transport of their devices, all at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from disttrain.doctor.pairs import rounds
from disttrain.errors import DisttrainError
from disttrain.process_group import (
    P2POp,
    ProcessGroup,
    World,
    all_gather_into_tensor,
    barrier,
    batch_isend_irecv,
    irecv,
    isend,
    new_group,
    recv,
    send,
)

LARGE_BYTES = 32 << 20
SMALL_BYTES = 64
NUM_SMALL = 20
NUM_LARGE = 3
TIMEOUT_S = 30.0

Row = tuple[int, int, float, float]
"""First and second node, seconds of a small message (0: not measured by this rank), bytes per second."""


def measure_links(world: World, nodes: Sequence[Sequence[int]]) -> tuple[list[Row], float]:
    """Measures links of this rank as one of the first node of pairs, and, on the first rank of a node, the seconds of a
    small gather over the first ranks of all (0 where there are two nodes, or it failed). `nodes` are their ranks.

    Collective: every rank of the world. Each node is in one pair at a time.
    """
    rows: list[Row] = []
    for number, pairs in enumerate(rounds(len(nodes))):
        link: tuple[int, int, ProcessGroup] | None = None
        for first, second in pairs:
            for ranks in zip(nodes[first], nodes[second], strict=False):
                group = new_group(list(ranks), timeout=TIMEOUT_S, sort_ranks=False)
                if world.rank in ranks:
                    assert isinstance(group, ProcessGroup)
                    link = first, second, group
        # Small messages go while the other ranks of both nodes are quiet.
        latency_s = 0.0 if link is None or world.rank != nodes[_node_of(world.rank, nodes)][0] else _latency_s(link[2])
        world.store.barrier(f"links/{number}/small", world.world_size, 4 * TIMEOUT_S)
        rate = 0.0 if link is None or latency_s is None else _bytes_per_s(link[2])
        world.store.barrier(f"links/{number}/large", world.world_size, 4 * TIMEOUT_S)
        if link is not None and rate and link[2].group_rank == 0:
            rows.append((link[0], link[1], latency_s or 0.0, rate))
    return rows, _gather_s(world, [ranks[0] for ranks in nodes])


def _node_of(rank: int, nodes: Sequence[Sequence[int]]) -> int:
    return next(node for node, ranks in enumerate(nodes) if rank in ranks)


def _latency_s(group: ProcessGroup) -> float | None:
    """One way; None where the two cannot talk."""
    device = group.world.device
    message = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    other = group.members[1 - group.group_rank]

    def to_and_fro() -> None:
        for turn in (send, recv) if group.group_rank == 0 else (recv, send):
            turn(message, other, group)

    return _median_s(group, to_and_fro, NUM_SMALL, 2)


def _bytes_per_s(group: ProcessGroup) -> float:
    """The rate of two ranks that send and receive at once, as in a ring; 0 where they cannot talk."""
    device = group.world.device
    sent = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    other = 1 - group.group_rank

    def exchange() -> None:
        batch = [
            P2POp(isend, sent, group=group, group_peer=other),
            P2POp(irecv, received, group=group, group_peer=other),
        ]
        for work in batch_isend_irecv(batch):
            work.wait()

    seconds = _median_s(group, exchange, NUM_LARGE, 1)
    return LARGE_BYTES / seconds if seconds else 0.0


def _gather_s(world: World, leaders: Sequence[int]) -> float:
    group = new_group(list(leaders), timeout=TIMEOUT_S, sort_ranks=False)
    if world.rank not in leaders or len(leaders) < 3:
        return 0.0
    assert isinstance(group, ProcessGroup)
    part = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=world.device)
    whole = torch.zeros(SMALL_BYTES * len(leaders), dtype=torch.uint8, device=world.device)
    return _median_s(group, lambda: all_gather_into_tensor(whole, part, group), NUM_SMALL, 1) or 0.0


def _median_s(group: ProcessGroup, run: Callable[[], object], num_runs: int, num_parts: int) -> float | None:
    """The median time of one part of a run; None where ranks cannot talk."""
    device = group.world.device
    durations_s = []
    try:
        barrier(group)
        for _ in range(num_runs + 1):
            began_s = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            durations_s.append(time.perf_counter() - began_s)
    except DisttrainError:
        return None
    # The first one connects.
    return statistics.median(durations_s[1:]) / num_parts
