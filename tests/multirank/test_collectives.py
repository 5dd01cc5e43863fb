"""Collectives on real ranks over Gloo: values, dtypes, groups, and one clear error for each mistake."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttrain
from disttrain import NON_GROUP_MEMBER, ReduceOp
from disttrain.errors import BackendError, CollectiveTimeoutError, GroupError, ShapeError
from disttrain.process_group import Call
from disttrain.testing.pytest_plugin import on_ranks

EVERY_DTYPE = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "int16", "bool", "complex64"]


def place() -> tuple[int, int]:
    return disttrain.get_rank(), disttrain.get_world_size()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8"])
def test_all_reduce(dtype: str) -> None:
    rank, size = place()
    tensor = torch.arange(5).to(getattr(torch, dtype)) + rank
    assert disttrain.all_reduce(tensor) is None
    assert tensor.tolist() == [value * size + size * (size - 1) // 2 for value in range(5)]


@on_ranks(2, 3)
def test_every_reduction_by_reduce_scatter_and_all_reduce() -> None:
    rank, size = place()
    values = torch.arange(2.0 * size) + 1
    stacked = torch.stack([values + other for other in range(size)])
    expected = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.AVG: stacked.mean(0),
        ReduceOp.PRODUCT: stacked.prod(0),
        ReduceOp.MIN: stacked.amin(0),
        ReduceOp.MAX: stacked.amax(0),
    }
    for op, whole in expected.items():
        part = torch.full((2,), -1.0)
        disttrain.reduce_scatter_tensor(part, values + rank, op)
        torch.testing.assert_close(part, whole[2 * rank : 2 * rank + 2])
        tensor = values + rank
        disttrain.all_reduce(tensor, op)
        torch.testing.assert_close(tensor, whole)


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_the_least_and_the_greatest_are_torchs_with_nan_and_infinities(op: str, dtype: str) -> None:
    rank, size = place()
    values = [0.0, -0.0, 1.5, -2.25, torch.inf, -torch.inf, torch.nan, 1e-7, -6e4]
    number, reduces = getattr(torch, dtype), torch.minimum if op == "MIN" else torch.maximum
    # Every pair of values, the one on one of the ranks, the other on all others.
    first, second = torch.cartesian_prod(*[torch.tensor(values, dtype=number)] * 2).unbind(1)
    expected = reduces(first, second)
    for holder in range(size):
        own = first if rank == holder else second
        tensor = own.clone()
        disttrain.all_reduce(tensor, getattr(ReduceOp, op))
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
        part = torch.empty(len(own), dtype=number)
        disttrain.reduce_scatter_tensor(part, own.repeat(size), getattr(ReduceOp, op))
        torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)
        tensor = own.clone()
        disttrain.reduce(tensor, 0, getattr(ReduceOp, op))
        if rank == 0:
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
    together = [torch.full((2,), torch.nan if rank == 1 else 1.0, dtype=number), torch.zeros(3, dtype=number)]
    disttrain.all_reduce_coalesced(together, getattr(ReduceOp, op))
    assert together[0].isnan().all()
    assert together[1].tolist() == [0.0] * 3


@on_ranks(2)
@pytest.mark.parametrize("op", ["SUM", "AVG", "MIN", "MAX", "PRODUCT"])
def test_coalesced_reductions_are_one_of_the_transports(op: str) -> None:
    rank, size = place()
    with torch.profiler.profile() as profiler:
        tensors = [torch.full((2,), 1.0 + rank), torch.full((3,), 2.0 - rank)]
        disttrain.all_reduce_coalesced(tensors, getattr(ReduceOp, op))
    assert [event.name for event in profiler.events()].count("gloo:all_reduce") == 1
    expected = {"SUM": (3.0, 3.0), "AVG": (1.5, 1.5), "MIN": (1.0, 1.0), "MAX": (2.0, 2.0), "PRODUCT": (2.0, 2.0)}[op]
    assert [tensor.tolist() for tensor in tensors] == [[expected[0]] * size, [expected[1]] * 3]


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["SUM", "AVG", "MIN", "MAX", "PRODUCT"])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_autograd_does_not_see_what_collectives_write(op: str, dtype: str, is_leaf: bool) -> None:
    """Neither in parameters, which it would refuse, nor in what is computed of them, whose gradients would change."""
    _, size = place()
    reduction = getattr(ReduceOp, op)

    def number(*, num: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = torch.ones(num, dtype=getattr(torch, dtype)).requires_grad_()
        return leaf, leaf if is_leaf else leaf * 2

    for collective in (
        lambda one, _: disttrain.all_reduce(one, reduction),
        lambda one, _: disttrain.all_reduce_coalesced([one], reduction),
        lambda one, _: disttrain.reduce(one, 0, reduction),
        lambda one, parts: disttrain.reduce_scatter(parts[0], list(one.chunk(size)), reduction),
        lambda one, parts: disttrain.reduce_scatter_tensor(parts[0], one, reduction),
        lambda one, parts: disttrain.all_gather(parts, one[:2]),
        lambda one, parts: disttrain.all_gather_into_tensor(one, parts[0]),
        lambda one, parts: disttrain.all_to_all(parts, list(one.chunk(size))),
        lambda one, _: disttrain.broadcast(one, 0),
    ):
        leaf, written = number()
        pieces = [number(num=2) for _ in range(size)]
        collective(written, [piece for _, piece in pieces])
        for source, result in [(leaf, written), *pieces]:
            result.sum().backward()
            assert source.grad is not None
            assert source.grad.tolist() == [1.0 if is_leaf else 2.0] * len(source)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_what_only_moves_data_takes_every_dtype(dtype: str) -> None:
    rank, size = place()
    mine = torch.tensor([[rank, 1], [0, rank]]).to(getattr(torch, dtype))
    everyone = [torch.tensor([[other, 1], [0, other]]).to(mine.dtype) for other in range(size)]
    gathered = mine.new_empty((2 * size, 2))
    disttrain.all_gather_into_tensor(gathered, mine)
    assert torch.equal(gathered, torch.cat(everyone))
    sent = mine.clone()
    disttrain.broadcast(sent, src=size - 1)
    assert torch.equal(sent, everyone[-1])
    if size > 1 and rank < 2:
        received = torch.empty_like(mine)
        if rank == 0:
            disttrain.send(mine, 1)
        else:
            assert disttrain.recv(received, 0) == 0
            assert torch.equal(received, everyone[0])


@on_ranks(2, 3)
def test_nothing_at_all_may_be_sent() -> None:
    _, size = place()
    empty = torch.empty(0, 3)
    disttrain.all_reduce(empty)
    disttrain.broadcast(empty, 0)
    gathered = torch.empty(0, 3)
    disttrain.all_gather_into_tensor(gathered, empty)
    disttrain.reduce_scatter_tensor(empty, torch.empty(0, 3))
    tensor = torch.ones(1)
    disttrain.all_reduce(tensor)
    assert tensor.item() == size


@on_ranks(2)
def test_the_names_of_later_torch() -> None:
    rank, size = place()
    gathered, part = torch.empty(2 * size), torch.empty(2)
    disttrain.all_gather_single(gathered, torch.full((2,), 1.0 + rank))
    assert gathered.tolist() == [1.0, 1.0, 2.0, 2.0]
    disttrain.reduce_scatter_single(part, gathered)
    assert part.tolist() == [2.0 * (1 + rank)] * 2


@on_ranks(2)
def test_asynchronous_work_ends_in_its_own_time() -> None:
    rank, _ = place()
    tensors = [torch.full((1000,), float(rank + step)) for step in range(5)]
    works = [disttrain.all_reduce(tensor, async_op=True) for tensor in tensors]
    for step, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None
        assert work.wait()
        assert work.is_completed()
        assert work.exception() is None
        assert work.is_success()
        work.synchronize()
        assert work.result()[0] is tensor
        assert tensor.eq(1 + 2 * step).all()


@on_ranks(3)
def test_groups_are_made_by_their_members_alone() -> None:
    rank, _ = place()
    # Ranks make different groups in different orders, and rank 2 makes one less: nobody waits for anybody.
    pairs = [(0, 1), (1, 2)] if rank == 1 else [(1, 2)] if rank == 2 else [(0, 1)]
    for pair in reversed(pairs):
        group = disttrain.new_group(pair)
        assert isinstance(group, disttrain.ProcessGroup)
        tensor = torch.tensor([float(rank)])
        disttrain.all_reduce(tensor, group=group)
        assert tensor.item() == sum(pair)
        assert (disttrain.get_rank(group), disttrain.get_world_size(group)) == (pair.index(rank), 2)
        disttrain.destroy_process_group(group)
    assert (disttrain.new_group([0]) is NON_GROUP_MEMBER) == (rank != 0)


@on_ranks(3)
def test_a_group_orders_its_ranks_as_torch_does() -> None:
    rank, _ = place()
    ascending = disttrain.new_group([2, 0, 1], use_local_synchronization=True, group_desc="all of them")
    assert disttrain.get_process_group_ranks(ascending) == [0, 1, 2]
    assert disttrain.get_rank(ascending) == rank
    group = disttrain.new_group([2, 0, 1], sort_ranks=False)
    gathered = torch.empty(3)
    disttrain.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    assert gathered.tolist() == [2.0, 0.0, 1.0]
    tensor = torch.tensor([rank])
    disttrain.broadcast(tensor, group=group, group_src=0)
    assert tensor.item() == 2
    assert disttrain.get_process_group_ranks(group) == [2, 0, 1]
    assert isinstance(group, disttrain.ProcessGroup)
    assert [disttrain.get_global_rank(group, group_rank) for group_rank in range(3)] == [2, 0, 1]
    assert [disttrain.get_group_rank(group, global_rank) for global_rank in range(3)] == [1, 2, 0]


def test_the_rank_on_the_node_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(GroupError, match="LOCAL_RANK is not set"):
        disttrain.get_node_local_rank()
    assert disttrain.get_node_local_rank(3) == 3
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert disttrain.get_node_local_rank(3) == 1


class Recorder:
    """Keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int, int | None]] = []

    def enqueued(self, call: Call) -> None:
        self.seen.append(("enqueued", call.operation, call.sequence, call.peer_rank))

    def completed(self, call: Call, error: Exception | None) -> None:
        self.seen.append(("failed" if error else "completed", call.operation, call.sequence, call.peer_rank))


@on_ranks(2)
def test_observers_see_every_call_at_the_one_door() -> None:
    rank, _ = place()
    recorder = Recorder()
    disttrain.current_world().add_observer(recorder)
    work = disttrain.all_reduce(torch.ones(1), async_op=True)
    disttrain.barrier()
    assert work is not None
    work.wait()
    if rank == 0:
        disttrain.send(torch.ones(1), 1)
    else:
        disttrain.recv(torch.ones(1), 0)
    message = "recv" if rank else "send"
    assert recorder.seen == [
        ("enqueued", "all_reduce", 1, None),
        ("enqueued", "barrier", 2, None),
        ("completed", "barrier", 2, None),
        ("completed", "all_reduce", 1, None),
        ("enqueued", message, 0, 1 - rank),
        ("completed", message, 0, 1 - rank),
    ]
    disttrain.current_world().remove_observer(recorder)
    disttrain.barrier()
    assert len(recorder.seen) == 6


@on_ranks(2)
def test_each_mistake_gets_one_clear_error_and_nobody_waits() -> None:
    rank, _ = place()
    ones = torch.ones(4)
    lonely = disttrain.new_group([rank])
    mistakes = [
        (ShapeError, "must be contiguous", lambda: disttrain.all_reduce(torch.ones(3, 2).T)),
        (ShapeError, "must have 2 times", lambda: disttrain.all_gather_into_tensor(torch.ones(9), ones)),
        (ShapeError, "must be alike", lambda: disttrain.reduce_scatter_tensor(torch.ones(2).double(), ones)),
        (BackendError, "serves device 'meta'", lambda: disttrain.all_reduce(torch.ones(2, device="meta"))),
        (GroupError, "global rank 7 is not a member", lambda: disttrain.broadcast(ones, 7)),
        (GroupError, "group rank 3 is out of range", lambda: disttrain.broadcast(ones, group_src=3)),
        (GroupError, "exactly one", lambda: disttrain.broadcast(ones)),
        (ShapeError, "with itself", lambda: disttrain.send(ones, rank)),
        (GroupError, "out of range; the world has ranks 0 to 1", lambda: disttrain.new_group([0, 2])),
        (GroupError, "is a rank already", disttrain.init_process_group),
        (ShapeError, "AVG of bool has no meaning", lambda: disttrain.all_reduce(torch.ones(2).bool(), ReduceOp.AVG)),
        (
            GroupError,
            "has been destroyed",
            lambda: (disttrain.destroy_process_group(lonely), disttrain.barrier(lonely)),
        ),
    ]
    for kind, rule, attempt in mistakes:
        with pytest.raises(kind, match=rule) as caught:
            attempt()
        assert f"[rank {rank}" in str(caught.value), str(caught.value)
    disttrain.barrier()


@on_ranks(3)
def test_a_call_on_a_group_without_this_rank_warns_and_does_nothing() -> None:
    """As torch's: a script may call on all ranks what is for some."""
    rank, _ = place()
    group = disttrain.new_group([0, 2])
    for call in calls_for(group):
        tensor = torch.full((4,), float(rank))
        if rank != 1:
            call(tensor)
            continue
        with pytest.warns(UserWarning, match="on rank 1 does nothing: this rank is not a member") as caught:
            assert call(tensor) in (None, -1)
        assert [warning.filename for warning in caught] == [__file__]
        assert tensor.tolist() == [1.0] * 4
    if rank == 1:
        with pytest.raises(GroupError, match="not a member"):
            disttrain.get_group_rank(group, 0)
    disttrain.barrier()


def calls_for(group: Any) -> list[Callable[[torch.Tensor], object]]:
    """A call of each kind, of a tensor of 4 elements, on a group of ranks 0 and 2."""
    rank, _ = place()

    def parts() -> list[torch.Tensor]:
        return [torch.zeros(4), torch.zeros(4)]

    def send_object(_: torch.Tensor) -> object:
        if rank == 0:
            return disttrain.send_object_list([1], dst=2, group=group)
        return disttrain.recv_object_list([None], src=0, group=group)

    def send(x: torch.Tensor) -> object:
        return disttrain.send(x, 2, group) if rank == 0 else disttrain.recv(x, 0, group)

    def isend(x: torch.Tensor) -> object:
        work = disttrain.isend(x, 2, group) if rank == 0 else disttrain.irecv(x, 0, group)
        return work and work.wait() and None

    return [
        lambda x: disttrain.all_reduce(x, group=group),
        lambda x: disttrain.reduce(x, 0, group=group),
        lambda x: disttrain.broadcast(x, 0, group=group),
        lambda x: disttrain.all_gather_into_tensor(torch.zeros(8), x, group=group),
        lambda x: disttrain.reduce_scatter_tensor(torch.zeros(2), x, group=group),
        lambda x: disttrain.all_gather(parts(), x, group=group),
        lambda x: disttrain.gather(x, parts() if rank == 0 else None, 0, group=group),
        lambda x: disttrain.scatter(x, parts() if rank == 0 else None, 0, group=group),
        lambda x: disttrain.reduce_scatter(x, parts(), group=group),
        lambda x: disttrain.all_to_all(parts(), [x, x], group=group),
        lambda x: disttrain.all_to_all_single(torch.zeros(4), x, group=group),
        lambda x: disttrain.all_reduce_coalesced([x], group=group),
        lambda x: disttrain.all_gather_coalesced([[part] for part in parts()], [x], group=group),
        lambda _: disttrain.barrier(group),
        lambda _: disttrain.monitored_barrier(group),
        lambda _: disttrain.all_gather_object([None] * 2, 1, group=group),
        lambda _: disttrain.gather_object(1, [None] * 2 if rank == 0 else None, 0, group=group),
        lambda _: disttrain.broadcast_object_list([1], 0, group=group),
        lambda _: disttrain.scatter_object_list([None], [1, 2], 0, group=group),
        send_object,
        send,
        isend,
    ]


@on_ranks(2)
def test_a_rank_that_does_not_come_is_a_timeout_that_says_where() -> None:
    rank, _ = place()
    group = disttrain.new_group(timeout=4)
    disttrain.barrier(group=group)
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError) as caught:
            disttrain.all_reduce(torch.ones(3), group=group)
        text = str(caught.value)
        assert text.startswith("all_reduce: not every rank came within 4 s")
        assert "ranks 0,1, sequence 2]" in text
    disttrain.barrier()


@on_ranks(2)
def test_two_threads_may_use_two_groups() -> None:
    groups = [disttrain.new_group(), disttrain.new_group()]
    totals = [0.0, 0.0]

    def reduce_many(position: int) -> None:
        for _ in range(30):
            tensor = torch.ones(16)
            disttrain.all_reduce(tensor, group=groups[position])
            totals[position] += tensor[0].item()

    threads = [threading.Thread(target=reduce_many, args=(position,)) for position in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == [60.0, 60.0]
