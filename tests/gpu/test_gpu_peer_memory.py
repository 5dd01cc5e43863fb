"""Exchanges by copy engines, of ranks that come early or late."""

from __future__ import annotations

import random

import torch

import disttrain
from disttrain.process_group.peers.memory import PeerMemory, peer_memory_of
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NEEDS_GPU_EACH, NUM_GPU_RANKS

pytestmark = NEEDS_GPU_EACH


def memory_of(group: disttrain.ProcessGroup) -> PeerMemory:
    memory = peer_memory_of(group, torch.device("cuda", torch.cuda.current_device()))
    assert memory is not None
    return memory


def value(rank: int, number: int, place: int) -> int:
    """A small whole number, of which sums are exact in bf16."""
    return (7 * rank + 3 * number + 5 * place) % 16


def check_gather(memory: PeerMemory, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """How many elements came wrong; each part is looked at before the others are waited for."""
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    own = torch.full(shape, value(rank, number, 0), device="cuda", dtype=torch.bfloat16)
    parts = own.new_full((shape[0], size, *shape[1:]), -1).movedim(1, 0)
    wrong, seen = torch.zeros((), device="cuda"), []
    for source, part in memory.gather(own, parts):
        wrong += (part != value(source, number, 0)).sum()
        seen.append(source)
    assert seen[0] == rank
    assert sorted(seen) == list(range(size))
    own.fill_(-2)
    for source, part in enumerate(parts):
        wrong += (part != value(source, number, 0)).sum()
    return wrong


def check_sum(memory: PeerMemory, number: int, shape: tuple[int, ...], late: int) -> torch.Tensor:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    terms = torch.stack([torch.full(shape, value(rank, number, place), device="cuda") for place in range(size)], 1)
    terms = terms.bfloat16().movedim(1, 0)
    adding = memory.sum(shape, torch.bfloat16)
    for step in range(1, size):
        adding.send((rank + step) % size, terms[(rank + step) % size])
    torch.cuda._sleep(late)
    total = adding.finish(terms[rank])
    return (total != sum(value(source, number, rank) for source in range(size))).sum()


@on_ranks(NUM_GPU_RANKS, timeout_s=100)
def test_ranks_that_come_early_or_late() -> None:
    group = disttrain.group.WORLD
    assert group is not None
    memory = memory_of(group)
    alike, own = random.Random(0), random.Random(1 + disttrain.get_rank())
    wrong = []
    streams = [torch.cuda.Stream() for _ in range(2)]
    for number in range(300):
        # Sizes up to what makes the memory grow, once.
        shape = (2, alike.choice([64, 4096, 40_000 if number > 200 else 4096]), 512)
        is_sum = alike.random() < 0.5
        with torch.cuda.stream(alike.choice(streams)):
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(3_000_000))
            wrong.append(
                check_sum(memory, number, shape, own.randrange(1_000_000))
                if is_sum
                else check_gather(memory, number, shape)
            )
        if own.random() < 0.05:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0] * 300
    disttrain.barrier()
