"""Joining a job that torch.distributed runs already: its groups as ours, over its transports."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.errors import GroupError
from disttrain.process_group import _c10d
from disttrain.process_group.backends import BACKENDS
from disttrain.process_group.backends.c10d_backend import C10dBackend
from disttrain.process_group.current import current_world, enter_process_world, has_world
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.joining import beside_torch, rendezvous
from disttrain.process_group.joining.hosts import tell_host
from disttrain.process_group.world import NonGroupMember, World
from disttrain.settings import TIMEOUT_S
from disttrain.store import PrefixStore


def from_torch(pg: Any = None) -> ProcessGroup:
    """torch's process group `pg` (None: its default group) as a group of ours that uses the same Gloo and NCCL.

    The first call makes this process a rank of a disttrain world, with torch's default group as its default group.
    destroy_process_group() ends that world; what torch made stays torch's to destroy.
    Raises:  GroupError when torch.distributed is not initialised, this rank is not in `pg`, or the world shares no
             transports with torch.
    Collective: the first call, by all ranks of the job; later ones need no other rank.
    """
    if not torch.distributed.is_initialized():
        raise GroupError(
            "from_torch",
            "torch.distributed is not initialised.",
            "Call torch.distributed.init_process_group first, or disttrain.init_process_group without torch.",
        )
    if pg is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(
            "from_torch",
            "this rank is not a member of the group.",
            "Call it on members only.",
            rank=torch.distributed.get_rank(),
        )
    if not has_world():
        enter_process_world(_join())
    world = current_world("from_torch")
    default = torch.distributed.group.WORLD
    if pg is None or pg is default:
        _check_shared(world, default)
        return world.default_group
    for group in world.groups:
        if group.torch_group is pg:
            return group
    _check_shared(world, default)
    ranks = tuple(torch.distributed.get_process_group_ranks(pg))
    group = world.adopted_group(f"torch/{pg.group_name}", ranks, _backend_text(pg))
    _adopt(group, pg)
    return group


def to_torch(group: object) -> Any:
    """The group as torch's own classes, such as DDP, take it: `ProcessGroup.to_torch` of ours, torch's as they are.

    None stays None, which is the default group there too; NON_GROUP_MEMBER becomes torch's.
    """
    if isinstance(group, NonGroupMember):
        return torch.distributed.GroupMember.NON_GROUP_MEMBER
    return group.to_torch() if isinstance(group, ProcessGroup) else group


def _join() -> World:
    timeout_s = TIMEOUT_S.read()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pg = torch.distributed.group.WORLD
    torch_store = _c10d.store_of_torch()
    # Each rank's first call after another world has the next number, and all ranks take part in each.
    key = f"disttrain/from_torch/{torch_store.add(f'disttrain/from_torch/num_inits/{rank}', 1)}"
    store = beside_torch.open_beside(torch_store, beside_torch.host_of(torch_store), rank, key, timeout_s)
    try:
        rendezvous.join(PrefixStore("from_torch", store), rendezvous.RendezvousInfo(rank, world_size), timeout_s)
        world = World(
            PrefixStore("from_torch", store),
            rank,
            world_size,
            backend=_backend_text(pg),
            timeout_s=timeout_s,
            owned_store=store,
        )
        _adopt(world.default_group, pg)
        tell_host(world)
    except BaseException:
        store.close()
        raise
    return world


def _check_shared(world: World, pg: Any) -> None:
    if world.default_group.torch_group is not pg:
        raise GroupError(
            "from_torch",
            "this process is a rank of a disttrain world that shares no transports with torch.distributed.",
            "Call from_torch before init_process_group, or init_process_group(register_with_torch=True).",
            rank=world.rank,
        )


def _backend_text(pg: Any) -> str:
    """Those of `pg`'s backends that we can drive, as `cpu:gloo,cuda:nccl`."""
    configured = [part.split(":") for part in torch.distributed.get_backend_config(pg).split(",")]
    usable = [
        f"{device}:{name}"
        for device, name in configured
        if name in BACKENDS and issubclass(BACKENDS[name], C10dBackend) and device in BACKENDS[name].devices
    ]
    if not usable:
        raise GroupError("from_torch", f"its backends are {configured}; none is Gloo or NCCL.", "Use one of these.")
    return ",".join(usable)


def _adopt(group: ProcessGroup, pg: Any) -> None:
    group.adopt(pg, {device: _c10d.transport_of(pg, device) for device in group.device_types})
