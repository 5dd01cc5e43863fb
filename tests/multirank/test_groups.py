"""Groups cut from others, groups given up, and barriers and timeouts that say who did not come."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

import disttrain
from disttrain import NON_GROUP_MEMBER, ProcessGroup
from disttrain.errors import BackendError, CollectiveMismatchError, CollectiveTimeoutError, GroupError
from disttrain.process_group._c10d import StoreAdapter
from disttrain.process_group.backends.gloo import GlooBackend
from disttrain.testing.pytest_plugin import on_ranks


def sum_in(group: ProcessGroup | None) -> float:
    tensor = torch.tensor([float(disttrain.get_rank())])
    disttrain.all_reduce(tensor, group=group)
    return tensor.item()


@on_ranks(4)
def test_neighbours() -> None:
    rank = disttrain.get_rank()
    own, every = disttrain.new_subgroups(2)
    assert isinstance(own, ProcessGroup)
    assert [group is own for group in every] == [rank < 2, rank >= 2]
    assert [group is NON_GROUP_MEMBER for group in every] == [rank >= 2, rank < 2]
    assert sum_in(own) == (1 if rank < 2 else 5)
    with pytest.raises(GroupError, match="group_size=3 does not divide the 4 ranks"):
        disttrain.new_subgroups(3)


@on_ranks(4)
def test_groups_by_enumeration_and_splits_of_groups() -> None:
    rank = disttrain.get_rank()
    own, _ = disttrain.new_subgroups_by_enumeration([[3, 0], [1]])
    if rank == 2:
        assert own is NON_GROUP_MEMBER
    else:
        assert isinstance(own, ProcessGroup)
        assert own.ranks == ((1,) if rank == 1 else (0, 3))
        assert sum_in(own) == (1 if rank == 1 else 3)
    with pytest.raises(GroupError, match="one rank twice"):
        disttrain.new_subgroups_by_enumeration([[0, 1], [1]])
    backwards = disttrain.new_group([3, 2, 1, 0], sort_ranks=False)
    assert isinstance(backwards, ProcessGroup)
    part = disttrain.split_group(backwards, [[1, 0], [2]])
    if rank == 0:
        assert part is None
    else:
        assert part is not None
        assert part.ranks == ((1,) if rank == 1 else (3, 2))
        assert sum_in(part) == (1 if rank == 1 else 5)
    with pytest.raises(GroupError, match="group rank 4 is out of range"):
        disttrain.split_group(backwards, [[4]])


@pytest.mark.parametrize("is_connected", [True, False])
@on_ranks(2)
def test_giving_up_ends_what_waits(is_connected: bool) -> None:
    rank = disttrain.get_rank()
    group = disttrain.new_group()
    if is_connected:
        disttrain.barrier(group)
    if rank == 0:
        timer = threading.Timer(1.0, disttrain.abort_process_group, (group,))
        timer.start()
        began_s = time.monotonic()
        with pytest.raises(BackendError, match="aborted on this rank"):
            disttrain.all_reduce(torch.ones(2), group=group)
        assert time.monotonic() - began_s < 50
        timer.join()
        with pytest.raises(GroupError, match="has been destroyed"):
            disttrain.barrier(group)
    disttrain.barrier()


@on_ranks(2)
def test_gloo_listens_where_it_is_told() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GLOO_SOCKET_IFNAME", "nosuch0,lo")
        with pytest.raises(BackendError, match=r"GLOO_SOCKET_IFNAME names nosuch0; there are .*\blo\b"):
            disttrain.barrier(disttrain.new_group())
        patched.setenv("GLOO_SOCKET_IFNAME", "lo, lo")
        group = disttrain.new_group()
        assert isinstance(group, ProcessGroup)
        assert [sum_in(group) for _ in range(3)] == [1, 1, 1]
        connections = psutil.Process().net_connections("tcp")
        ends = {end.laddr.ip for end in connections if end.status == psutil.CONN_ESTABLISHED}
        assert ends <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@on_ranks(4)
def test_a_monitored_barrier_names_the_absent() -> None:
    rank = disttrain.get_rank()
    disttrain.monitored_barrier(timeout=60)
    disttrain.barrier()
    left = [key for key in disttrain.current_world().store.list_keys() if "/monitored/" in key]
    assert left == []
    group = disttrain.new_group()
    disttrain.barrier()
    if rank in {0, 2}:
        with pytest.raises(CollectiveTimeoutError, match=r"ranks 1, 3 did not come within 2 s.*sequence 1\]"):
            disttrain.monitored_barrier(group, timeout=2)
    disttrain.monitored_barrier(timeout=60)


@on_ranks(3)
def test_a_timeout_names_who_did_not_come_and_where_they_are() -> None:
    rank = disttrain.get_rank()
    group = disttrain.new_group(timeout=4)
    disttrain.barrier(group=group)
    if rank != 1:
        with pytest.raises(CollectiveTimeoutError, match=r"did not come|not every rank came") as caught:
            disttrain.all_reduce(torch.ones(3), group=group)
        text = str(caught.value)
        assert "within 4 s: rank 1 is at sequence 1 (barrier) and now at " in text
        assert "ranks 0-2, sequence 2]" in text
    disttrain.barrier()


@on_ranks(3)
def test_connecting_in_vain_is_a_timeout_too() -> None:
    rank = disttrain.get_rank()
    disttrain.barrier()
    group = disttrain.new_group(timeout=1)
    if rank != 1:
        with pytest.raises(CollectiveTimeoutError, match="rank 1 is at no collective of the group yet"):
            disttrain.all_reduce(torch.ones(3), group=group)
    disttrain.barrier()


@on_ranks(3)
def test_ranks_that_compare_their_calls_all_hear_what_does_not_fit() -> None:
    rank = disttrain.get_rank()
    disttrain.current_world().compares_calls = True
    ones = torch.ones(4)
    mismatches = {
        r"operation: all_reduce on ranks 0,2, broadcast on rank 1": lambda: (
            disttrain.broadcast(ones, 0) if rank == 1 else disttrain.all_reduce(ones)
        ),
        r"sizes: \[\[4\]\] on ranks 0,1, \[\[5\]\] on rank 2": lambda: disttrain.all_reduce(torch.ones(4 + rank // 2)),
        r"dtype: float32 on rank 0, float64 on ranks 1,2": lambda: disttrain.all_reduce(
            ones.double() if rank else ones
        ),
        r"reduction: MAX on rank 0, SUM on ranks 1,2": lambda: disttrain.all_reduce(
            ones, disttrain.ReduceOp.SUM if rank else disttrain.ReduceOp.MAX
        ),
        r"root: 0 on ranks 0,2, 1 on rank 1": lambda: disttrain.broadcast(ones, rank % 2),
        r"sizes: rank 0 sends 2 to rank 1, which expects 3": lambda: disttrain.all_to_all_single(
            torch.ones(7 if rank == 1 else 6),
            torch.ones(6),
            [3, 2, 2] if rank == 1 else None,
            None,
        ),
    }
    for rule, attempt in mismatches.items():
        with pytest.raises(CollectiveMismatchError, match=rule):
            attempt()
    for _ in range(3):
        disttrain.all_reduce(ones)
    outputs = [torch.empty(other) for other in range(3)]
    disttrain.all_gather(outputs, torch.ones(rank))
    disttrain.all_to_all([torch.empty(other) for other in range(3)], [torch.empty(rank) for _ in range(3)])
    disttrain.gather(ones, [torch.empty(4) for _ in range(3)] if rank == 0 else None)
    disttrain.scatter(ones, [torch.empty(4) for _ in range(3)] if rank == 0 else None)
    group = disttrain.new_group(timeout=4)
    disttrain.barrier(group)
    if rank == 2:
        with pytest.raises(CollectiveTimeoutError, match=r"within 4 s: ranks 0,1 did not"):
            disttrain.barrier(group)
    disttrain.barrier()


@on_ranks(2)
def test_what_nobody_waits_for_holds_up_no_end() -> None:
    """Rank 1 comes to what rank 0 has begun and forgotten only when rank 0 has let go of the group."""
    group = disttrain.new_group([0, 1], timeout=60)
    assert isinstance(group, ProcessGroup)
    disttrain.barrier(group)
    if disttrain.get_rank() == 0:
        disttrain.all_reduce(torch.ones(4), group=group, async_op=True)
        began_s = time.monotonic()
        disttrain.destroy_process_group(group)
        assert 4 < time.monotonic() - began_s < 50
    disttrain.barrier()


@on_ranks(3)
def test_who_has_its_part_may_leave_while_others_still_connect() -> None:
    """The last rank is slow to meet the others; rank 1, a leaf of the broadcast's tree, does not wait for it."""
    rank, get = disttrain.get_rank(), StoreAdapter.get

    def get_slowly(store: StoreAdapter, key: str) -> bytes:
        time.sleep(0.01 if rank == 2 else 0)
        return get(store, key)

    with mock.patch.object(StoreAdapter, "get", get_slowly):
        for _ in range(8):
            group = disttrain.new_group()
            assert isinstance(group, ProcessGroup)
            sent = torch.tensor(float(rank))
            disttrain.broadcast(sent, src=0, group=group)
            disttrain.destroy_process_group(group)
            assert sent == 0
    disttrain.barrier()


@on_ranks(2)
def test_connecting_has_one_timeout() -> None:
    """Rank 1 comes when half of it is over, connects, and comes too late to where they meet."""
    group = disttrain.new_group(timeout=12)
    assert isinstance(group, ProcessGroup)
    store, began_s = group.world.store, time.monotonic()
    if disttrain.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match="within 12 s"):
            disttrain.barrier(group)
        assert time.monotonic() - began_s < 17
        store.set("rank 0 has given up", b"")
    else:
        time.sleep(6)
        with mock.patch.object(GlooBackend, "_meet"):
            group.backend("barrier", "cpu")
        store.wait(["rank 0 has given up"])
        # Rank 0 has hung up; why, is told as well, and may come first.
        with pytest.raises((BackendError, CollectiveMismatchError), match=r"transport failed|rank 0 refused barrier"):
            disttrain.barrier(group)
    disttrain.barrier()


@on_ranks(2)
def test_sums_of_nothing_hold_up_no_end() -> None:
    """Gloo takes no part in them, and says for ever that they are under way."""
    group = disttrain.new_group([0, 1], timeout=60)
    assert isinstance(group, ProcessGroup)
    disttrain.reduce_scatter_tensor(torch.empty(0), torch.empty(0), group=group, async_op=True)
    began_s = time.monotonic()
    group.shutdown(60)
    assert time.monotonic() - began_s < 40
    disttrain.destroy_process_group(group)
    disttrain.barrier()


@on_ranks(3)
def test_over_a_file_that_goes_with_its_last_user() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    paths = [f"/tmp/disttrain-{time.time_ns()}-{place}" for place in range(2)]  # noqa: S108 -- alike on all ranks
    disttrain.broadcast_object_list(paths)
    for path in paths:
        disttrain.destroy_process_group()
        disttrain.init_process_group(init_method=f"file://{path}", rank=rank, world_size=size, timeout=60)
        assert sum_in(None) == 3
        disttrain.barrier()
    # All ranks have left the first world: they have met in the second.
    assert [Path(path).exists() for path in paths] == [False, True]
    disttrain.barrier()
