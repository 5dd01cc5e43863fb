"""Messages between two ranks, under torch.distributed's names."""

from __future__ import annotations

from typing import cast

import torch

from disttrain.errors import ShapeError
from disttrain.process_group.collectives import peer_rank
from disttrain.process_group.current import resolve_group
from disttrain.process_group.door import issue
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.work import Work


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Start sending `tensor` (contiguous, any shape) to global rank `dst`, or group rank `group_dst`.

    The tensor must not change until the handle's `wait` has returned. `tag` tells messages of one pair apart, but not
    on NCCL.
    Raises: GroupError for a peer that is not a member, or this rank itself; ShapeError when not contiguous.
    """
    group = resolve_group("send", group)
    peer = _checked_peer("send", group, peer_rank("send", group, dst, group_dst, "dst"), tensor)
    run = group.backend("send", tensor.device.type).send
    return cast(Work, issue(group, "send", run, (tensor, peer, tag), (tensor,), (), True, peer))


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Start receiving into `tensor` from global rank `src`, or group rank `group_src`.

    The tensor is contiguous and has the sender's dtype and size.
    Raises: as isend.
    """
    group = resolve_group("recv", group)
    peer = _checked_peer("recv", group, peer_rank("recv", group, src, group_src, "src"), tensor)
    run = group.backend("recv", tensor.device.type).recv
    return cast(Work, issue(group, "recv", run, (tensor, peer, tag), (), (tensor,), True, peer))


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """isend, then wait for it."""
    isend(tensor, dst, group, tag, group_dst).wait()


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """irecv, then wait for it. Returns: the sender's global rank."""
    group = resolve_group("recv", group)
    irecv(tensor, src, group, tag, group_src).wait()
    return group.ranks[peer_rank("recv", group, src, group_src, "src")]


def _checked_peer(operation: str, group: ProcessGroup, peer: int, tensor: torch.Tensor) -> int:
    if peer == group.group_rank:
        raise ShapeError(
            operation, "a rank cannot exchange messages with itself.", "Copy the tensor.", rank=group.world.rank
        )
    if not tensor.is_contiguous():
        raise ShapeError(
            operation,
            f"the tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}; it must be contiguous.",
            "Pass its .contiguous() copy.",
            rank=group.world.rank,
        )
    return peer
