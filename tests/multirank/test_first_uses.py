"""A group connects at its first use, whatever order the ranks come to that in, and whoever of them uses it at all."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
import torch

import disttrain
from disttrain import P2POp, ProcessGroup, Work
from disttrain.errors import CollectiveTimeoutError
from disttrain.testing.pytest_plugin import on_ranks


def group_of_all(timeout_s: float | None = None) -> ProcessGroup:
    group = disttrain.new_group(timeout=timeout_s)
    assert isinstance(group, ProcessGroup)
    return group


def neighbours() -> tuple[int, int]:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    return (rank + 1) % size, (rank - 1) % size


def reduce_in(group: ProcessGroup) -> Callable[[], bool]:
    tensor = torch.ones(1000)
    work = disttrain.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return lambda: work.wait() and bool((tensor == group.group_size).all())


def gather_in(group: ProcessGroup) -> Callable[[], bool]:
    output = torch.empty(group.group_size)
    work = disttrain.all_gather_into_tensor(output, torch.tensor([float(group.group_rank)]), group, async_op=True)
    assert work is not None
    return lambda: work.wait() and output.tolist() == list(range(group.group_size))


def pass_on_in(group: ProcessGroup) -> Callable[[], bool]:
    following, previous = neighbours()
    received = torch.empty(1)
    works = [
        disttrain.isend(torch.tensor([float(disttrain.get_rank())]), following, group),
        disttrain.irecv(received, previous, group),
    ]
    return lambda: all(work.wait() for work in works) and received.item() == previous


def batch_in(group: ProcessGroup) -> Callable[[], bool]:
    following, previous = neighbours()
    received = torch.empty(1)
    works: list[Work] = disttrain.batch_isend_irecv(
        [
            P2POp(disttrain.isend, torch.tensor([float(disttrain.get_rank())]), following, group),
            P2POp(disttrain.irecv, received, previous, group),
        ]
    )
    return lambda: all(work.wait() for work in works) and received.item() == previous


def coalesced_in(group: ProcessGroup) -> Callable[[], bool]:
    tensors = [torch.ones(2), torch.ones(3)]
    with disttrain.coalescing_manager(group, async_ops=True) as batch:
        for tensor in tensors:
            disttrain.all_reduce(tensor, group=group)
    return lambda: batch.wait() and all(bool((tensor == group.group_size).all()) for tensor in tensors)


USES = {
    "all_reduce": reduce_in,
    "all_gather_into_tensor": gather_in,
    "isend, irecv": pass_on_in,
    "batch_isend_irecv": batch_in,
    "coalescing_manager": coalesced_in,
}


@on_ranks(2, 3)
@pytest.mark.parametrize("name", list(USES))
def test_each_rank_begins_with_another_group(name: str) -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    groups = [group_of_all() for _ in range(size)]
    finish = {number: USES[name](groups[number]) for number in ((rank + step) % size for step in range(size))}
    assert [finish[number]() for number in range(size)] == [True] * size
    # And the other way round, now that they are connected.
    assert all(check() for check in [USES[name](group) for group in groups])


@on_ranks(2, 3)
def test_ranks_make_their_groups_in_another_order() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    orders = [tuple((first + step) % size for step in range(size)) for first in range(size)]
    finish = []
    for ranks in orders[rank:] + orders[:rank]:
        group = disttrain.new_group(ranks)
        assert isinstance(group, ProcessGroup)
        finish.append(reduce_in(group))
    assert all(check() for check in finish)


@on_ranks(4)
def test_axes_of_a_mesh_and_a_group_of_the_same_ranks() -> None:
    rank = disttrain.get_rank()
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    names = ["rows", "columns"] if rank % 2 else ["columns", "rows"]
    own = None
    if rank % 2:
        own = disttrain.new_group(mesh.get_group("rows").ranks)
    finish = [reduce_in(mesh.get_group(name)) for name in names]
    if own is None:
        own = disttrain.new_group(mesh.get_group("rows").ranks)
    assert isinstance(own, ProcessGroup)
    finish.append(gather_in(own))
    assert all(check() for check in finish)


@on_ranks(3)
def test_messages_of_two_ranks_need_no_third() -> None:
    rank = disttrain.get_rank()
    first, second = group_of_all(), group_of_all()
    tensor = torch.tensor([float(rank)])
    # Around: each waits for a message in a group that the one who sends it to has not used yet.
    if rank == 0:
        disttrain.send(tensor, 1, first)
        disttrain.recv(tensor, 2, second)
    elif rank == 1:
        disttrain.recv(tensor, 0, first)
        disttrain.send(tensor, 2, first)
    else:
        disttrain.recv(tensor, 1, first)
        disttrain.send(tensor, 0, second)
    # Rank 1 never uses the second group.
    assert tensor.item() == 0.0
    disttrain.barrier()
    disttrain.destroy_process_group(second)
    assert reduce_in(first)()


@on_ranks(3)
def test_groups_that_nobody_uses_are_not_connected() -> None:
    disttrain.barrier()
    process = psutil.Process()
    before = len(process.net_connections("tcp"))
    groups = [group_of_all() for _ in range(5)]
    disttrain.barrier()
    assert len(process.net_connections("tcp")) == before
    assert reduce_in(groups[3])()
    disttrain.barrier()
    assert [group.is_connected("cpu") for group in groups] == [False, False, False, True, False]


@on_ranks(2)
def test_a_group_that_another_rank_has_destroyed_is_not_connected_again() -> None:
    group = group_of_all(timeout_s=1)
    if disttrain.get_rank():
        disttrain.destroy_process_group(group)
    disttrain.barrier()
    if disttrain.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match="rank 1"):
            disttrain.all_reduce(torch.ones(1), group=group)
    disttrain.barrier()
