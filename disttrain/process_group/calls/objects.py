"""Python values among ranks, under torch.distributed's names; they travel as msgpack, never as pickles.

A value that cannot be packed must not leave the others waiting: its rank sends the reason in place of it, and every
rank that gets it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from disttrain.arguments import answer_to, arguments_of
from disttrain.errors import ShapeError
from disttrain.process_group.calls.checks import peer_rank, root_rank
from disttrain.process_group.calls.collectives import all_gather_into_tensor, broadcast
from disttrain.process_group.calls.list_collectives import gather, scatter
from disttrain.process_group.calls.packing import pack, unpack
from disttrain.process_group.calls.point_to_point import recv, send
from disttrain.process_group.current import called_group
from disttrain.process_group.group import ProcessGroup

_PACKED, _REASON = b"\x00", b"\x01"


def all_gather_object(object_list: MutableSequence[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Put every rank's `obj`, in group order, into `object_list`, which has one place per rank.

    Values are what `packing.pack` takes: plain values, lists, tuples, dicts, sets, dates, paths, arrays, dataclasses,
    enums and named tuples, and tensors, which arrive on the CPU.
    Raises: ShapeError, on every rank, when one rank's value cannot be packed; on this one for a list of another length.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("all_gather_object", group)) is None:
        return
    with _before(group, "all_gather_object", "all_gather_into_tensor"):
        _check_target("object_list", object_list)
        _check_places("all_gather_object", group, "object_list", object_list, group.group_size)
        device = _device(group)
        packed = _packed(obj)
    sizes = torch.empty(group.group_size, dtype=torch.int64, device=device)
    all_gather_into_tensor(sizes, torch.tensor([len(packed)], device=device), group)
    counts = sizes.tolist()
    gathered = torch.empty(group.group_size * max(counts), dtype=torch.uint8, device=device)
    all_gather_into_tensor(gathered, _padded(packed, max(counts), device), group)
    parts = gathered.view(group.group_size, -1)
    object_list[:] = _restored(
        "all_gather_object", group, [part[:size] for part, size in zip(parts, counts, strict=True)]
    )


def gather_object(
    obj: Any,
    object_gather_list: MutableSequence[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Put every rank's `obj` into `object_gather_list` at the destination (default: global rank 0), None elsewhere.

    Raises: as all_gather_object, at the destination and on the rank of the value.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("gather_object", group)) is None:
        return
    with _before(group, "gather_object", "all_gather_into_tensor"):
        dst_rank = root_rank("gather_object", group, dst, group_dst, "dst")
        is_root = group.group_rank == dst_rank
        if is_root:
            _check_target("object_gather_list", object_gather_list)
            _check_places("gather_object", group, "object_gather_list", object_gather_list or (), group.group_size)
        device = _device(group)
        packed = _packed(obj)
    sizes = torch.empty(group.group_size, dtype=torch.int64, device=device)
    all_gather_into_tensor(sizes, torch.tensor([len(packed)], device=device), group)
    counts = sizes.tolist()
    padded = _padded(packed, max(counts), device)
    parts = [torch.empty_like(padded) for _ in counts] if is_root else None
    gather(padded, parts, group=group, group_dst=dst_rank)
    if parts is not None:
        assert object_gather_list is not None
        cut = [part[:size] for part, size in zip(parts, counts, strict=True)]
        object_gather_list[:] = _restored("gather_object", group, cut)
    else:
        _raise_own("gather_object", group, packed)


def broadcast_object_list(
    object_list: MutableSequence[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Replace the objects in `object_list` by those of the source (default: global rank 0), on all ranks.

    All ranks' lists have one length; `device` is where the bytes travel.
    Raises: as all_gather_object.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("broadcast_object_list", group)) is None:
        return
    with _before(group, "broadcast_object_list", "broadcast"):
        src_rank = root_rank("broadcast_object_list", group, src, group_src, "src")
        _check_target("object_list", object_list)
        device = device or _device(group)
        is_root = group.group_rank == src_rank
        packed = _packed(list(object_list)) if is_root else b""
        size = torch.tensor([len(packed)], device=device)
    broadcast(size, group=group, group_src=src_rank)
    data = _padded(packed, int(size.item()), device)
    broadcast(data, group=group, group_src=src_rank)
    (received,) = _restored("broadcast_object_list", group, [data], [src_rank])
    _fill("broadcast_object_list", group, object_list, received, keeps_own=is_root)


def scatter_object_list(
    scatter_object_output_list: MutableSequence[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Put this rank's object of the source's `scatter_object_input_list` in the first place of the output list.

    The source (default: global rank 0) has one object per rank, in group order.
    Raises: as all_gather_object, on each rank that would get a value that cannot be packed, and at the source.
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("scatter_object_list", group)) is None:
        return
    packed: list[bytes] = []
    with _before(group, "scatter_object_list", "broadcast"):
        src_rank = root_rank("scatter_object_list", group, src, group_src, "src")
        _check_target("scatter_object_output_list", scatter_object_output_list)
        if not scatter_object_output_list:
            _check_places("scatter_object_list", group, "scatter_object_output_list", (), 1)
        device = _device(group)
        if group.group_rank == src_rank:
            values = scatter_object_input_list or ()
            _check_places("scatter_object_list", group, "scatter_object_input_list", values, group.group_size)
            packed = [_packed(value) for value in values]
    sizes = torch.zeros(group.group_size, dtype=torch.int64, device=device)
    if packed:
        sizes.copy_(torch.tensor([len(data) for data in packed]))
    broadcast(sizes, group=group, group_src=src_rank)
    counts = sizes.tolist()
    received = torch.empty(max(counts), dtype=torch.uint8, device=device)
    parts = [_padded(data, max(counts), device) for data in packed] or None
    scatter(received, parts, group=group, group_src=src_rank)
    (value,) = _restored("scatter_object_list", group, [received[: counts[group.group_rank]]], [src_rank])
    for data in packed:
        _raise_own("scatter_object_list", group, data)
    scatter_object_output_list[0] = value


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send the objects of a list to one rank, which calls recv_object_list. `use_batch` is torch's; it changes nothing.

    Raises: as send; ShapeError, there too, when they cannot be packed.
    """
    if (group := called_group("send_object_list", group)) is None:
        return
    with arguments_of("send_object_list", group.world.rank):
        peer = peer_rank("send_object_list", group, dst, group_dst, "dst")
        device = device or _device(group)
        packed = _packed(list(object_list))
        messages = torch.tensor([len(packed)], device=device), _padded(packed, len(packed), device)
    for data in messages:
        send(data, group=group, group_dst=peer)
    _raise_own("send_object_list", group, packed)


def recv_object_list(
    object_list: MutableSequence[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Replace the objects in `object_list` by those that a rank sends; with neither src nor group_src, any rank.

    `use_batch` is torch's, and changes nothing.
    Returns: the sender's global rank. Raises: as recv; ShapeError when the lists differ in length.
    """
    if (group := called_group("recv_object_list", group)) is None:
        return -1
    with arguments_of("recv_object_list", group.world.rank):
        _check_target("object_list", object_list)
        device = device or _device(group)
        size = torch.zeros(1, dtype=torch.int64, device=device)
    sender = recv(size, src, group, group_src=group_src)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    recv(data, sender, group)
    (received,) = _restored("recv_object_list", group, [data], [group.group_rank_of("recv_object_list", sender)])
    _fill("recv_object_list", group, object_list, received, keeps_own=False)
    return sender


@contextmanager
def _before(group: ProcessGroup, operation: str, begins_with: str) -> Iterator[None]:
    """Tells the other ranks if the block fails: this one does not come to the first collective of `operation`."""
    try:
        yield
    except Exception as error:
        answer = answer_to(operation, error, group.world.rank) or error
        group.refuse(operation, answer, begins_with)
        if answer is not error:
            raise answer from error
        raise


def _device(group: ProcessGroup) -> torch.device:
    """The device of packed values on their way: the CPU, on which they are made, if the group serves it."""
    return torch.device("cpu") if group.serves("cpu") else group.barrier_device


def _packed(value: Any) -> bytes:
    """The value, or the reason why it cannot travel."""
    try:
        return _PACKED + pack(value, with_classes=True)
    except ShapeError as error:
        return _REASON + pack([error.problem, error.remedy])


def _padded(data: bytes, size: int, device: torch.device) -> torch.Tensor:
    padded = torch.zeros(size, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return padded.to(device)


def _restored(
    operation: str, group: ProcessGroup, parts: Sequence[torch.Tensor], senders: Sequence[int] | None = None
) -> list[Any]:
    """The values of packed bytes that came from these group ranks (None: all, in order)."""
    packed = [part.cpu().numpy().tobytes() for part in parts]
    for sender, data in zip(range(len(parts)) if senders is None else senders, packed, strict=True):
        _check_packed(operation, group, sender, data)
    return [unpack(data[1:], with_classes=True) for data in packed]


def _raise_own(operation: str, group: ProcessGroup, packed: bytes) -> None:
    """The rank of a value that could not travel hears of it too."""
    _check_packed(operation, group, group.group_rank, packed)


def _check_packed(operation: str, group: ProcessGroup, sender: int, data: bytes) -> None:
    if data[:1] == _REASON:
        reason, remedy = unpack(data[1:])
        problem = f"rank {group.members[sender]} has no value that can travel: {reason}"
        raise ShapeError(operation, problem, remedy, rank=group.world.rank)


def _check_target(name: str, values: object) -> None:
    """Raise TypeError for what objects cannot be put into; None is an empty list."""
    if isinstance(values, torch.Tensor) or (values is not None and not hasattr(values, "__setitem__")):
        raise TypeError(f"{name} is a {type(values).__name__}, and no list")


def _check_places(operation: str, group: ProcessGroup, name: str, values: Any, num_places: int) -> None:
    if isinstance(values, torch.Tensor) or not hasattr(values, "__getitem__"):
        raise TypeError(f"{name} is a {type(values).__name__}, and no list")
    if len(values) != num_places:
        raise ShapeError(
            operation,
            f"{name} has {len(values)} places; {num_places} are needed.",
            "Make it [None] * group_size for outputs, or give one object per rank.",
            rank=group.world.rank,
        )


def _fill(
    operation: str, group: ProcessGroup, target: MutableSequence[Any], received: list[Any], *, keeps_own: bool
) -> None:
    if len(target) != len(received):
        raise ShapeError(
            operation,
            f"object_list has {len(target)} places, {len(received)} objects came.",
            "Give lists of one length on all ranks.",
            rank=group.world.rank,
        )
    if not keeps_own:
        target[:] = received
