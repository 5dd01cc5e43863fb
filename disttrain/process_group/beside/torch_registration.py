"""Letting torch.distributed know groups of ours, so that what is written for it finds them."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.errors import BackendError, GroupError
from disttrain.process_group._c10d import (
    TimesOutAsTorchs,
    TorchRegistration,
    plain_group,
    register_transport,
    tell_ranks,
)
from disttrain.process_group.backends.c10d_backend import C10dBackend
from disttrain.process_group.beside.torch_group import TorchGroup
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.world import world_of
from disttrain.store import PrefixStore


def register(group: ProcessGroup) -> Any:
    """`ProcessGroup.to_torch`."""
    if group.torch_group is None:
        _check_free(group)
        _make_known(group, tuple(group.backend_classes))
    elif not isinstance(group.torch_group, TorchGroup) and group.registration is not None:
        for device_type in set(group.device_types) - {device.type for device in group.torch_group._device_types}:
            register_transport(group.torch_group, device_type, *group.transport(device_type))
    return group.torch_group


def register_if_free(group: ProcessGroup) -> None:
    """Let torch know the default group, where that disturbs nobody and connects no ranks."""
    kinds = group.backend_classes
    can_share = all(issubclass(kind, C10dBackend) for kind in kinds.values())
    if can_share and not torch.distributed.is_initialized():
        # NCCL connects at its first collective anyhow; torch then has no transport for CPUs, as by its own "nccl".
        _make_known(group, tuple(device for device, kind in kinds.items() if kind.coalesces) or tuple(kinds))
        assert group.registration is not None
        group.registration.give_way(group.forget_registration)


def _make_known(group: ProcessGroup, device_types: tuple[str, ...]) -> None:
    kinds = {device_type: group.backend_classes[device_type] for device_type in device_types}
    for kind in kinds.values():
        if not issubclass(kind, C10dBackend):
            raise BackendError(
                "to_torch",
                f"group {group.group_name} uses {group.backend_name}; torch can share Gloo and NCCL only.",
                "Choose these, or leave `backend` out.",
                rank=group.world.rank,
            )
    store = TimesOutAsTorchs(PrefixStore(f"torch/{group.group_name}", group.world.store))
    if any(kind.coalesces for kind in kinds.values()):
        # torch batches messages in groups of its own class alone, without which NCCL's would wait in a circle.
        transports = {device_type: group.transport(device_type) for device_type in kinds}
        made: Any = plain_group(store, group.group_rank, group.group_size, transports)
    else:
        made = TorchGroup(group, store)
    names = {device_type: kind.short_name() for device_type, kind in kinds.items()}
    is_default = group is group.world.default_group
    name = f"disttrain/{group.group_name}"
    group.registration = TorchRegistration(made, name, group.members, store, names, is_default)
    group.torch_group = made
    if is_default:
        world_of(group).make_ranks_known(lambda made: tell_ranks(made, made.members, made.backend_name))


def _check_free(group: ProcessGroup) -> None:
    is_default = group is group.world.default_group
    if torch.distributed.is_initialized() == is_default:
        raise GroupError(
            "to_torch",
            "torch.distributed is initialised already, by somebody else."
            if is_default
            else "torch.distributed is not initialised, and this is not the default group.",
            "Destroy that first, or join it by from_torch."
            if is_default
            else "Call init_process_group without register_with_torch=False.",
            rank=group.world.rank,
        )
