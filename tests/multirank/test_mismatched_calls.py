"""Ranks that call different things, or of which one never comes, all hear so within a second, and no process aborts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttrain
from disttrain import ProcessGroup
from disttrain.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupError
from disttrain.flight_recorder import FlightRecorder
from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.flight_recorder.dumps.dump import encode
from disttrain.flight_recorder.dumps.reading.reader import decode
from disttrain.testing.pytest_plugin import on_ranks

WITHIN_S = 40
"""A second, on a machine that does nothing else."""


def ones(num_elements: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(num_elements, dtype=dtype)


def gather_into(num_elements: int, group: ProcessGroup) -> None:
    disttrain.all_gather_into_tensor(ones(num_elements * group.group_size), ones(num_elements), group)


def reduce_scatter_of(num_elements: int, group: ProcessGroup) -> None:
    disttrain.reduce_scatter_tensor(ones(num_elements), ones(num_elements * group.group_size), group=group)


def exchange(num_elements: int, group: ProcessGroup) -> None:
    disttrain.all_to_all_single(
        ones(num_elements * group.group_size), ones(num_elements * group.group_size), group=group
    )


def gather_lists(num_elements: int, group: ProcessGroup) -> None:
    disttrain.all_gather([ones(num_elements) for _ in group.ranks], ones(num_elements), group)


def gather_to(root: int, num_elements: int, group: ProcessGroup) -> None:
    is_root = group.group_rank == root
    parts = [ones(num_elements) for _ in group.ranks] if is_root else None
    disttrain.gather(ones(num_elements), parts, root, group)


Call = Callable[[int, ProcessGroup], Any]
"""Of a rank: 0 for the last one of a group, which is another than the others', else 1."""
CALLS: dict[str, tuple[str, Call]] = {
    "sizes of all_reduce": (
        r"sizes: \[400\] on .*\[4\] on rank",
        lambda odd, group: disttrain.all_reduce(ones(4 if odd else 400), group=group),
    ),
    "larger sizes of all_reduce": (
        r"sizes: \[4\] on .*\[400\] on rank",
        lambda odd, group: disttrain.all_reduce(ones(400 if odd else 4), group=group),
    ),
    "dtypes of all_reduce": (
        "dtype: float32 on .*float64 on rank",
        lambda odd, group: disttrain.all_reduce(ones(4, torch.float64 if odd else torch.float32), group=group),
    ),
    "sizes of all_gather_into_tensor": (r"sizes: ", lambda odd, group: gather_into(5 if odd else 4, group)),
    "sizes of reduce_scatter_tensor": (r"sizes: ", lambda odd, group: reduce_scatter_of(5 if odd else 4, group)),
    "sizes of all_to_all_single": ("larger than what|sizes: ", lambda odd, group: exchange(5 if odd else 4, group)),
    "sizes of all_gather": ("sizes: ", lambda odd, group: gather_lists(50 if odd else 4, group)),
    "sizes of broadcast": (
        r"sizes: \[4\] on .*\[9\] on rank",
        lambda odd, group: disttrain.broadcast(ones(9 if odd else 4), group_src=group.group_size - 1, group=group),
    ),
    "sizes of gather": ("sizes: ", lambda odd, group: gather_to(0, 9 if odd else 4, group)),
    "roots of broadcast": (
        "root: 0 on .*1 on rank",
        lambda odd, group: disttrain.broadcast(ones(), group_src=1 if odd else 0, group=group),
    ),
    "operations": (
        "operation: all_reduce on .*broadcast on rank",
        lambda odd, group: disttrain.broadcast(ones(), 0, group) if odd else disttrain.all_reduce(ones(), group=group),
    ),
    "a barrier": (
        "operation: all_reduce on .*barrier on rank",
        lambda odd, group: disttrain.barrier(group) if odd else disttrain.all_reduce(ones(), group=group),
    ),
}


def call_apart(name: str, *, is_connected: bool, is_async: bool = False) -> None:
    expected, call = CALLS[name]
    group = disttrain.new_group()
    assert isinstance(group, ProcessGroup)
    if is_connected:
        for _ in range(3):
            disttrain.all_reduce(ones(), group=group)
    disttrain.barrier()
    began_s = time.monotonic()

    def call_and_go_on() -> None:
        call(group.group_rank == group.group_size - 1, group)
        # Who only sends need not have waited: the next call says it.
        while time.monotonic() < began_s + WITHIN_S:
            disttrain.barrier(group)

    with pytest.raises((CollectiveMismatchError, GroupError), match=expected) as told:
        call_and_go_on()
    assert time.monotonic() - began_s < WITHIN_S
    for rank in group.ranks:
        assert str(rank) in str(told.value)
    assert "test_mismatched_calls.py" in str(told.value)
    with pytest.raises(GroupError, match="has ended: "):
        disttrain.barrier(group)
    disttrain.destroy_process_group(group)
    # Other groups go on.
    tensor = ones()
    disttrain.all_reduce(tensor)
    assert tensor[0] == group.group_size


@on_ranks(2, 3)
@pytest.mark.parametrize("name", list(CALLS))
def test_calls_that_do_not_fit_are_told_to_all(name: str) -> None:
    call_apart(name, is_connected=True)


@on_ranks(2)
@pytest.mark.parametrize("name", ["sizes of all_reduce", "operations"])
def test_they_are_at_the_first_use_too(name: str) -> None:
    call_apart(name, is_connected=False)


@on_ranks(2)
def test_a_larger_message_that_nobody_waits_for_yet_ends_no_process() -> None:
    group = disttrain.new_group()
    assert isinstance(group, ProcessGroup)
    disttrain.barrier(group)
    if disttrain.get_rank() == 0:
        work = disttrain.all_reduce(ones(4), group=group, async_op=True)
        assert work is not None
        disttrain.current_world().store.wait([f"witness/notice/mismatch/{group.group_name}"], 30)
        with pytest.raises(CollectiveMismatchError, match=r"sizes: \[4\] on rank 0, \[400\] on rank 1"):
            work.wait()
    else:
        with pytest.raises(CollectiveMismatchError, match=r"sizes: \[4\] on rank 0, \[400\] on rank 1"):
            disttrain.all_reduce(ones(400), group=group)
    disttrain.barrier()


ENDED: dict[str, tuple[Kind, Callable[[int], Any]]] = {
    "reductions": (
        Kind.MISMATCHED_REDUCTION,
        lambda odd: disttrain.all_reduce(ones(), disttrain.ReduceOp.MAX if odd else disttrain.ReduceOp.SUM),
    ),
    "dtypes": (
        Kind.MISMATCHED_DTYPE,
        lambda odd: disttrain.all_gather_into_tensor(
            ones(8).int() if odd else ones(8), ones().int() if odd else ones()
        ),
    ),
    "shapes": (Kind.NOTHING_WRONG, lambda odd: disttrain.all_reduce(torch.ones((2, 2) if odd else 4))),
}


@on_ranks(2)
@pytest.mark.parametrize("name", list(ENDED))
def test_calls_that_do_not_fit_and_end_are_named_by_the_analyzer(name: str) -> None:
    kind, call = ENDED[name]
    call(disttrain.get_rank())
    recorder = disttrain.current_world().recorder
    assert isinstance(recorder, FlightRecorder)
    told: list[Any] = [None] * 2
    disttrain.all_gather_object(told, encode(recorder.snapshot("asked for")))
    dumps = [decode(dump) for dump in told]
    (verdict,) = judge(match(dumps))
    assert verdict.kind == kind
    text = " ".join([verdict.summary, *verdict.evidence])
    assert f"{name} as #1 of group world" in text or f"other {name}, of as many elements, as #1 of group world" in text
    assert text.count("test_mismatched_calls.py") >= 2


@on_ranks(3)
def test_reductions_that_do_not_fit_are_told_to_ranks_that_wait() -> None:
    group = disttrain.new_group()
    assert isinstance(group, ProcessGroup)
    disttrain.barrier(group)
    rank, store = disttrain.get_rank(), disttrain.current_world().store
    if rank == 2:
        store.wait(["heard 0", "heard 1"], 30)
        return
    op = disttrain.ReduceOp.MAX if rank == 1 else disttrain.ReduceOp.SUM
    with pytest.raises((CollectiveMismatchError, GroupError), match=r"reduction: SUM on ranks? 0.*, MAX on rank 1"):
        disttrain.all_reduce(ones(), op, group)
    store.set(f"heard {rank}", b"")


@on_ranks(3)
def test_a_rank_that_is_late_is_waited_for() -> None:
    group = disttrain.new_group()
    assert isinstance(group, ProcessGroup)
    disttrain.barrier(group)
    for late in range(2):
        if disttrain.get_rank() == late:
            # Not before the others wait for so long that they look.
            disttrain.current_world().store.wait([f"{group.group_name}/waiting/{group.sequence + 1}"], 30)
        tensor = ones()
        disttrain.all_reduce(tensor, group=group)
        assert tensor.tolist() == [3.0] * 4
    disttrain.barrier(group)
    left = [key for key in disttrain.current_world().store.list_keys() if "/waiting/" in key]
    disttrain.barrier()
    assert [key for key in left if group.group_name in key and not key.endswith(f"/{group.sequence}")] == []


@on_ranks(3)
def test_who_leaves_the_job_is_not_waited_for() -> None:
    world = disttrain.current_world()
    group = disttrain.new_group(timeout=60)
    disttrain.barrier(group)
    if world.rank == 1:
        disttrain.destroy_process_group()
        return
    began_s = time.monotonic()
    with pytest.raises(disttrain.errors.BackendError, match="rank 1 has left the job after sequence 1"):
        disttrain.all_reduce(ones(), group=group)
    # Also where nobody has used the group before.
    with pytest.raises(CollectiveMismatchError, match="rank 1 has left the job before the first collective"):
        disttrain.all_reduce(ones(), group=disttrain.new_group(timeout=60))
    assert time.monotonic() - began_s < WITHIN_S


@on_ranks(2)
def test_a_timeout_says_where_the_other_is() -> None:
    group = disttrain.new_group(timeout=4)
    disttrain.barrier(group)
    store = disttrain.current_world().store
    if disttrain.get_rank() == 0:
        said = r"rank 1 is at sequence 1 \(barrier\) and now at .*\.py:"
        with pytest.raises(CollectiveTimeoutError, match=said) as told:
            disttrain.all_reduce(ones(), group=group)
        # It is not shown below the ends of the slices in which it was waited for.
        assert told.value.__cause__ is not None
        assert told.value.__cause__.__context__ is None
        store.set("is over", b"")
    else:
        store.wait(["is over"], 30)
