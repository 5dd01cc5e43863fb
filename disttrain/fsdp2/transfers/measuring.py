"""Measures the cost of a gather over a group that leaves its host: once, by all of its ranks together."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from disttrain.fsdp2.transfers.forms import TransferCost
from disttrain.process_group import ProcessGroup, ReduceOp, all_gather_into_tensor, all_reduce, broadcast
from disttrain.process_group.joining.hosts import leaves_host
from disttrain.ranks import Ranks

if TYPE_CHECKING:
    from disttrain.fsdp2.params.sharding import Sharding

_SMALL_BYTES, _LARGE_BYTES, _MOST_BYTES = 64, 4 * 2**20, 64 * 2**20
_NUM_SMALL, _NUM_LARGE = 4, 2
_FEW_LATENCIES = 4
"""A gather that takes longer than this shows the bandwidth; a shorter one does not, reliably."""
Costs = tuple[TransferCost | None, TransferCost | None]
"""Over the ranks that share parameters, and over those that hold copies."""


def costs_of(sharding: Sharding, device: torch.device) -> Costs:
    """Over the ranks that share parameters, and over those that hold copies; None where these are on one host. Alike
    on all ranks of the mesh.

    Collective the first time, but in a world of one host.
    """
    if not leaves_host(sharding.mesh.world.default_group):
        return None, None
    shard_cost = cost_over(sharding.shard_group, device) if sharding.num_shards > 1 else None
    group = sharding.replicate_group
    if group is None:
        return shard_cost, None
    known_costs: dict[Ranks, Costs] = group.costs_of_mesh
    shards = sharding.shard_group.members
    if shards not in known_costs:
        known_costs[shards] = _agreed(sharding, (shard_cost, cost_over(group, device)), device)
    return known_costs[shards]


def _agreed(sharding: Sharding, costs: Costs, device: torch.device) -> Costs:
    """The worst of each value. Groups along one axis measure separately. With different plans, groups along the other
    axis would wait for each other, since replicas are averaged in the same sets as parameters are gathered."""
    rates = [(0.0, 0.0) if cost is None else (cost.latency_s, 1 / cost.bytes_per_s) for cost in costs]
    with torch.inference_mode(False), torch.no_grad():
        message = torch.tensor(rates, dtype=torch.float64).to(device)
        for group in (sharding.replicate_group, sharding.shard_group):
            all_reduce(message, ReduceOp.MAX, group=group)
    shard, replica = (TransferCost(rate[0], 1 / rate[1]) if rate[1] else None for rate in message.tolist())
    return shard, replica


def cost_over(group: ProcessGroup, device: torch.device) -> TransferCost | None:
    """Over this group, as its first rank has measured it; None where it does not leave its host."""
    if not leaves_host(group):
        return None
    if group.transfer_cost is None:
        group.transfer_cost = _measured(group, device)
    return group.transfer_cost  # type: ignore[no-any-return]


def _measured(group: ProcessGroup, device: torch.device) -> TransferCost:
    world = group.world
    outer, world.module = world.module, "measuring the network"
    try:
        with torch.inference_mode(False), torch.no_grad():
            took_s = partial(_gathering_s, group=group, device=device)
            took_s(_SMALL_BYTES)  # connects
            small_s = _told(min(took_s(_SMALL_BYTES) for _ in range(_NUM_SMALL)), group, device)
            num_bytes = _LARGE_BYTES
            while True:
                took_s(num_bytes)  # makes memory
                large_s = _told(min(took_s(num_bytes) for _ in range(_NUM_LARGE)), group, device)
                if large_s > _FEW_LATENCIES * small_s or num_bytes >= _MOST_BYTES:
                    return TransferCost(small_s, num_bytes / max(large_s - small_s, 1e-6))
                num_bytes *= 4
    finally:
        world.module = outer


def _gathering_s(num_bytes: int, group: ProcessGroup, device: torch.device) -> float:
    part = torch.zeros(-(-num_bytes // group.size()), dtype=torch.uint8, device=device)
    whole = part.new_empty(part.numel() * group.size())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    all_gather_into_tensor(whole, part, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s


def _told(seconds: float, group: ProcessGroup, device: torch.device) -> float:
    """Returns the measurement of the group's first rank: it decides, since plans must be alike on all."""
    message = torch.tensor(seconds, dtype=torch.float64).to(device)
    broadcast(message, group=group, group_src=0)
    return message.item()
