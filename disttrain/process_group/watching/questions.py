"""Queries of groups and of the ranks in them, under torch.distributed's names; some are private there."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.errors import GroupError
from disttrain.process_group.current import current_world, resolve_group
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.world import NonGroupMember
from disttrain.settings import LOCAL_RANK
from disttrain.store import Store
from disttrain.store.durations import Duration, seconds


def get_backend(group: ProcessGroup | None = None) -> str:
    """The group's transports: "gloo" or "nccl" where it has one for all its devices, else as "cpu:gloo,cuda:nccl"."""
    name = resolve_group("get_backend", group).backend_name
    kinds = {part.rpartition(":")[2] for part in name.split(",")}
    return kinds.pop() if len(kinds) == 1 else name


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """The group's transports by device type, such as "cpu:gloo,cuda:nccl"."""
    return resolve_group("get_backend_config", group).backend_name


def get_pg_count() -> int:
    """The number of groups that this rank has, the default group among them."""
    return len(current_world("get_pg_count").groups)


def _set_pg_timeout(timeout: Duration, group: ProcessGroup | None = None) -> None:
    """torch's name for `ProcessGroup.set_timeout`."""
    resolve_group("_set_pg_timeout", group).set_timeout(seconds("_set_pg_timeout", timeout))


def _rank_not_in_group(group: ProcessGroup | NonGroupMember | None) -> bool:
    """torch's question: is it NON_GROUP_MEMBER?"""
    return isinstance(group, NonGroupMember)


def _get_default_group() -> ProcessGroup:
    """torch's name for `group.WORLD` where there is one. Raises GroupError before init_process_group."""
    return current_world("_get_default_group").default_group


def _get_default_store() -> Store:
    """torch's name for the store of the default group."""
    return current_world("_get_default_store").store


def _get_process_group_store(group: ProcessGroup | None) -> Store:
    """torch's name for the store of a group: the job's, whichever it is."""
    resolve_group("_get_process_group_store", group)
    return current_world("_get_process_group_store").store


def _resolve_process_group(group_name: str) -> ProcessGroup:
    """torch's name for the group of a name. Raises GroupError when there is none."""
    return current_world("_resolve_process_group").find_group("_resolve_process_group", group_name)


def _get_pg_config(group: ProcessGroup | None = None) -> dict[str, Any]:
    """torch's name for what a group is: "pg_name", "pg_desc", "backend_config", "pg_size" and global "ranks"."""
    group = resolve_group("_get_pg_config", group)
    return {
        "pg_name": group.group_name,
        "pg_desc": group.axis_name or "undefined",
        "backend_config": group.backend_name,
        "pg_size": group.group_size,
        "ranks": list(group.ranks),
    }


def _get_all_pg_configs() -> list[dict[str, Any]]:
    """torch's name for `_get_pg_config` of each group that this rank has."""
    return [_get_pg_config(group) for group in current_world("_get_all_pg_configs").groups]


def _get_process_group_name(group: ProcessGroup | None) -> str:
    """torch's name for `ProcessGroup.group_name`."""
    return resolve_group("_get_process_group_name", group).group_name


def _get_group_size(group: ProcessGroup | None) -> int:
    """torch's name for `ProcessGroup.group_size`."""
    return resolve_group("_get_group_size", group).group_size


def _get_pg_default_device(group: ProcessGroup | None = None) -> torch.device:
    """torch's name for where a group's barriers and objects are: this rank's device, if a transport serves it."""
    return resolve_group("_get_pg_default_device", group).barrier_device


def _get_object_coll_device(group: ProcessGroup | None = None) -> str:
    """torch's name for the type of `_get_pg_default_device`."""
    return _get_pg_default_device(group).type


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """The global ranks of the group's members, in group order."""
    return list(resolve_group("get_process_group_ranks", group).ranks)


def get_global_rank(group: ProcessGroup | None, group_rank: int) -> int:
    """The global rank of the group's member `group_rank`. Raises GroupError when it is out of range."""
    group = resolve_group("get_global_rank", group)
    return group.members[group.checked_group_rank("get_global_rank", group_rank)]


def get_group_rank(group: ProcessGroup | None, global_rank: int) -> int:
    """The rank in the group of `global_rank`. Raises GroupError when it is not a member."""
    return resolve_group("get_group_rank", group).group_rank_of("get_group_rank", global_rank)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This process's rank on its node, as its launcher says. Raises GroupError without launcher and `fallback_rank`."""
    local_rank = LOCAL_RANK.read()
    if local_rank is None:
        local_rank = fallback_rank
    if local_rank is None:
        raise GroupError(
            "get_node_local_rank",
            "LOCAL_RANK is not set, so that no launcher has started this process.",
            "Start it with disttrain-launch, or give fallback_rank.",
        )
    return local_rank
