"""Messages between two ranks, under torch.distributed's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttrain.arguments import answer_to, arguments_of
from disttrain.errors import GroupError, ShapeError
from disttrain.process_group._torch import outside_graphs
from disttrain.process_group.calls.checks import check_contiguous, peer_rank
from disttrain.process_group.calls.coalescing import Coalesced
from disttrain.process_group.current import called_group, resolve_group
from disttrain.process_group.door import issue_message
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.work import TransportWork, Work


@outside_graphs
def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start sending `tensor` (contiguous, any shape) to global rank `dst`, or group rank `group_dst`.

    The tensor must not change until the handle's `wait` has returned. `tag` tells messages of one pair apart, but not
    on NCCL.
    Raises: GroupError for a peer that is not a member, or this rank itself; ShapeError when not contiguous.
    """
    if (group := called_group("send", group)) is None:
        return None
    try:
        # The same as `_peer`, without the time of a call.
        peer = group.members.position(dst) if dst is not None and group_dst is None else None
        if peer is None or peer == group.group_rank or not tensor.is_contiguous():
            peer = _peer("send", group, tensor, dst, group_dst, "dst")
        run = group.backend_of("send", tensor).send
    except (AttributeError, TypeError) as error:
        raise _answer("send", group, error) from error
    return issue_message(group, "send", run, tensor, peer, tag)


@outside_graphs
def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start receiving into `tensor` from global rank `src`, or group rank `group_src`; with neither, from anybody.

    The tensor is contiguous and has the sender's dtype and size. `source_rank` of the handle says afterwards who sent.
    Raises: as isend; BackendError on NCCL, which does not receive from anybody.
    """
    if (group := called_group("recv", group)) is None:
        return None
    try:
        # As above.
        peer = group.members.position(src) if src is not None and group_src is None else None
        if peer is None or peer == group.group_rank or not tensor.is_contiguous():
            run, tensor, peer = _receiving(group, tensor, src, group_src)
        else:
            run = group.backend_of("recv", tensor).recv
    except (AttributeError, TypeError) as error:
        raise _answer("recv", group, error) from error
    return issue_message(group, "recv", run, tensor, peer, tag)


def start_sending(tensor: torch.Tensor, group: ProcessGroup, peer: int) -> Work:
    """isend of a contiguous tensor to group rank `peer`, another one, of a group of this rank's: nothing is checked."""
    return issue_message(group, "send", group.backend_of("send", tensor).send, tensor, peer)


def start_receiving(tensor: torch.Tensor, group: ProcessGroup, peer: int) -> Work:
    """irecv, likewise."""
    return issue_message(group, "recv", group.backend_of("recv", tensor).recv, tensor, peer)


@outside_graphs
def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """isend, then wait for it."""
    # Not by isend itself: the recorder looks at who has called this.
    if (group := called_group("send", group)) is None:
        return
    try:
        peer = _peer("send", group, tensor, dst, group_dst, "dst")
        run = group.backend_of("send", tensor).send
    except (AttributeError, TypeError) as error:
        raise _answer("send", group, error) from error
    issue_message(group, "send", run, tensor, peer, tag).wait()


@outside_graphs
def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """irecv, then wait for it. Returns: the sender's global rank."""
    if (group := called_group("recv", group)) is None:
        return -1
    try:
        receiving = _receiving(group, tensor, src, group_src)
    except (AttributeError, TypeError) as error:
        raise _answer("recv", group, error) from error
    work = issue_message(group, "recv", *receiving, tag)
    work.wait()
    return work.source_rank()


class P2POp:
    """One message of `batch_isend_irecv`: `op` is `isend` or `irecv`, the rest are its arguments."""

    __slots__ = ("group", "group_peer", "op", "tag", "tensor")

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        """Raises GroupError for another `op`, or a peer that cannot be."""
        self.group = resolve_group("P2POp", group)
        if op is not isend and op is not irecv:
            raise GroupError(
                "P2POp", f"op={op!r} is unknown.", "Give disttrain.isend or irecv.", rank=self.group.world.rank
            )
        self.op = op
        self.tensor = tensor
        self.tag = tag
        try:
            self.group_peer = peer_rank("P2POp", self.group, peer, group_peer, "peer")
            _check_message("P2POp", self.group, self.group_peer, tensor)
        except (AttributeError, TypeError) as error:
            raise _answer("P2POp", self.group, error) from error

    @property
    def peer(self) -> int:
        """The other side's global rank."""
        return self.group.members[self.group_peer]


@outside_graphs
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start several messages together, in any order; a ring that sends and receives does not lock itself.

    On NCCL they are one launch. Returns: a handle for each. Raises GroupError for an empty list, or messages of
    several groups or kinds of device.
    """
    with arguments_of("batch_isend_irecv", remedy="Give a list of disttrain.P2POp."):
        others = [type(message) for message in p2p_op_list if type(message) is not P2POp]
    for kind in others:
        problem = f"a message is a {kind.__module__}.{kind.__qualname__}, and none of disttrain's."
        raise GroupError("batch_isend_irecv", problem, "Make each by disttrain.P2POp.")
    if not p2p_op_list:
        raise GroupError("batch_isend_irecv", "the list of messages is empty.", "Give at least one P2POp.")
    group, first = p2p_op_list[0].group, p2p_op_list[0].tensor
    device = first.device
    for message in p2p_op_list:
        if message.group is not group or message.tensor.device != device:
            raise GroupError(
                "batch_isend_irecv",
                "the messages are of several groups or devices.",
                "Make one batch for each group and device.",
                rank=group.world.rank,
            )
    backend = group.backend_of("batch_isend_irecv", first)
    with Coalesced(group, backend, async_ops=True) as batch:
        for message in p2p_op_list:
            tensor, peer = message.tensor, message.group_peer
            if peer == group.group_rank or not tensor.is_contiguous():
                _check_message("batch_isend_irecv", group, peer, tensor)
            if message.op is isend:
                issue_message(group, "send", backend.send, tensor, peer, message.tag)
            else:
                issue_message(group, "recv", backend.recv, tensor, peer, message.tag)
    return batch.works


def _answer(operation: str, group: ProcessGroup, error: Exception) -> Exception:
    """Translates Python's error for a tensor or a peer of the wrong kind into ours."""
    remedy = "Give a tensor, and its other end's rank as a number."
    return answer_to(operation, error, group.world.rank, remedy) or error


def _receiving(
    group: ProcessGroup, tensor: torch.Tensor, rank: int | None, group_rank: int | None
) -> tuple[Callable[[torch.Tensor, Any, int], TransportWork], torch.Tensor, int | None]:
    """The backend's call, the tensor to receive into, and the sender's group rank, if one is named; all are checked."""
    if rank is None and group_rank is None:
        check_contiguous("recv", group, "tensor", tensor)
        recv_any = group.backend_of("recv", tensor).recv_any
        return lambda tensor, _, tag: recv_any(tensor, tag), tensor, None
    peer = _peer("recv", group, tensor, rank, group_rank, "src")
    return group.backend_of("recv", tensor).recv, tensor, peer


def _peer(
    operation: str,
    group: ProcessGroup,
    tensor: torch.Tensor,
    rank: int | None,
    group_rank: int | None,
    name: str,
) -> int:
    """The other end's rank in the group, once both it and the tensor are checked."""
    peer = group.members.position(rank) if rank is not None and group_rank is None else None
    if peer is None:
        peer = peer_rank(operation, group, rank, group_rank, name)
    if peer == group.group_rank or not tensor.is_contiguous():
        _check_message(operation, group, peer, tensor)
    return peer


def _check_message(operation: str, group: ProcessGroup, peer: int, tensor: torch.Tensor) -> None:
    if peer == group.group_rank:
        raise ShapeError(
            operation, "a rank cannot exchange messages with itself.", "Copy the tensor.", rank=group.world.rank
        )
    if not tensor.is_contiguous():
        check_contiguous(operation, group, "tensor", tensor)
