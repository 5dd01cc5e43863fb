"""The hosts of a group's ranks, by which it chooses how to communicate.

Ranks say so once, in the store, when they join. Two are on one host where the transports take them so: NCCL goes by the
host's name and boot, or by NCCL_HOSTID where that is set (its documentation, environment variables); and what lives in
two network namespaces reaches each other by a network.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain.settings import NCCL_HOSTID

if TYPE_CHECKING:
    from disttrain.process_group.interfaces import GroupLike, WorldLike

_MAX_ASKED = 64
"""Of larger groups that many ranks, evenly spread, are asked about."""


def tell_host(world: WorldLike) -> None:
    """Leave the host of this rank in the store."""
    world.store.set(_key(world.rank), _own_host())
    world.tells_host = True


def leaves_host(group: GroupLike) -> bool:
    """True where some ranks of the group are on other hosts than others; alike on all of them.

    Waits for those that have not joined yet.
    """
    if group.spans_hosts is None:
        ranks = group.members
        step = -(-len(ranks) // _MAX_ASKED)
        sampled = dict.fromkeys((*ranks[::step], ranks[-1]))
        is_known = group.world.tells_host and len(ranks) > 1
        hosts = group.world.store.multi_get([_key(rank) for rank in sampled]) if is_known else []
        group.spans_hosts = len(set(hosts)) > 1
    return group.spans_hosts


def _key(rank: int) -> str:
    return f"host/{rank}"


def _own_host() -> str:
    network = Path("/proc/self/ns/net")
    namespace = os.readlink(network) if network.exists() else ""
    named = NCCL_HOSTID.read()
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = named or f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    return f"{host} {namespace}"
