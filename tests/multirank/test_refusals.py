"""What one rank alone gets wrong: it says so to the others, and nobody waits for the timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttrain
from disttrain.errors import CollectiveMismatchError, DisttrainError, GroupError, ShapeError
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks

ALONE = 1
"""The rank that is wrong; it is the root as well."""


def ones(num_elements: int = 2) -> torch.Tensor:
    return torch.ones(num_elements)


def lists(is_wrong: bool) -> list[torch.Tensor]:
    return [ones() for _ in range(disttrain.get_world_size() - is_wrong)]


def objects(is_wrong: bool) -> list[Any]:
    return [None] * (disttrain.get_world_size() - is_wrong)


def _gather(is_wrong: bool, group: disttrain.ProcessGroup) -> None:
    is_root = group.group_rank == ALONE
    disttrain.gather(ones(), lists(is_wrong) if is_root else None, ALONE, group)


def _scatter(is_wrong: bool, group: disttrain.ProcessGroup) -> None:
    is_root = group.group_rank == ALONE
    disttrain.scatter(ones(), lists(is_wrong) if is_root else None, ALONE, group)


def _nothing_at_root(is_wrong: bool, group: disttrain.ProcessGroup) -> None:
    is_root = group.group_rank == ALONE
    parts: Any = [None for _ in lists(False)] if is_wrong else lists(False)
    disttrain.gather(ones(), parts if is_root else None, ALONE, group)


def _scatter_objects(is_wrong: bool, group: disttrain.ProcessGroup) -> None:
    disttrain.scatter_object_list([None], objects(is_wrong) if group.group_rank == ALONE else None, ALONE, group)


def _gather_objects(is_wrong: bool, group: disttrain.ProcessGroup) -> None:
    disttrain.gather_object(1, objects(is_wrong) if group.group_rank == ALONE else None, ALONE, group)


Attempt = Callable[[bool, disttrain.ProcessGroup], object]
ATTEMPTS: dict[str, tuple[str, Attempt]] = {
    "gather": ("gather_list has", _gather),
    "a list of nothing": ("not what belongs there: 'NoneType'", _nothing_at_root),
    "scatter": ("scatter_list has", _scatter),
    "all_gather": ("tensor_list has", lambda wrong, group: disttrain.all_gather(lists(wrong), ones(), group)),
    "all_to_all": (
        "input_tensor_list has",
        lambda wrong, group: disttrain.all_to_all(lists(False), lists(wrong), group),
    ),
    "all_to_all_single": (
        "are not",
        lambda wrong, group: disttrain.all_to_all_single(
            ones(6), ones(6), None, [5, 5] if wrong else None, group=group
        ),
    ),
    "reduce_scatter": (
        "input_list has",
        lambda wrong, group: disttrain.reduce_scatter(ones(), lists(wrong), group=group),
    ),
    "all_gather_into_tensor": (
        "output has shape",
        lambda wrong, group: disttrain.all_gather_into_tensor(ones(2 * group.group_size + wrong), ones(), group),
    ),
    "not contiguous": (
        "must be contiguous",
        lambda wrong, group: disttrain.all_reduce(torch.ones(4)[::2] if wrong else ones(), group=group),
    ),
    "no such rank": (
        "global rank 7 is not a member",
        lambda wrong, group: disttrain.broadcast(ones(), 7 if wrong else 0, group),
    ),
    "no such device": (
        "no backend of group",
        lambda wrong, group: disttrain.all_reduce(torch.ones(2, device="meta" if wrong else "cpu"), group=group),
    ),
    "a reduction that cannot be": (
        "",
        lambda wrong, group: disttrain.all_reduce(
            ones(), disttrain.ReduceOp.BAND if wrong else disttrain.ReduceOp.SUM, group
        ),
    ),
    "scatter_object_list": ("scatter_object_input_list has", _scatter_objects),
    "gather_object": ("object_gather_list has", _gather_objects),
    "all_gather_object": (
        "object_list has",
        lambda wrong, group: disttrain.all_gather_object(objects(wrong), 1, group),
    ),
}


def notice_key(sequence: int) -> str:
    return f"witness/notice/world/{sequence}/1"


def wait_until_told(sequence: int) -> None:
    """Until a refusal in the default group has been told to all."""
    disttrain.current_world().store.wait([notice_key(sequence)], 30)


def attempt_and_meet(attempt: Attempt, group: disttrain.ProcessGroup) -> None:
    attempt(False, group)
    # Whoever only sends need not have waited: the next one says it.
    disttrain.barrier(group)


def attempt_alone(name: str, *, is_connected: bool) -> None:
    """One rank is wrong, and raises its own error; the others raise one that repeats its reason."""
    reason, attempt = ATTEMPTS[name]
    rank = disttrain.get_rank()
    # Letting go of the group may take Gloo as long as that.
    group = disttrain.new_group(timeout=100)
    assert isinstance(group, disttrain.ProcessGroup)
    if is_connected:
        disttrain.barrier(group)
    if rank == ALONE:
        with pytest.raises(DisttrainError) as own:
            attempt(True, group)
        assert reason in f"{type(own.value).__name__}: {own.value}"
        assert not isinstance(own.value, CollectiveMismatchError)
    else:
        began_s = time.monotonic()
        with pytest.raises((CollectiveMismatchError, GroupError), match=f"rank {ALONE} refused") as told:
            attempt_and_meet(attempt, group)
        assert reason in str(told.value)
        assert time.monotonic() - began_s < 60
        with pytest.raises(GroupError, match=f"has ended: rank {ALONE} refused"):
            disttrain.barrier(group)
    disttrain.destroy_process_group(group)
    disttrain.barrier()


@on_ranks(3)
@pytest.mark.parametrize("name", list(ATTEMPTS))
def test_the_others_learn_it_at_once(name: str) -> None:
    attempt_alone(name, is_connected=True)


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["gather", "all_gather", "not contiguous", "scatter_object_list"])
def test_the_others_learn_it_while_they_connect(name: str) -> None:
    attempt_alone(name, is_connected=False)


@on_ranks(3)
def test_what_all_ranks_refuse_leaves_the_group_as_it_is() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    disttrain.barrier()
    for sequence in (2, 3):
        with pytest.raises(ShapeError, match="must be contiguous"):
            disttrain.all_reduce(torch.ones(4)[::2])
        if rank == 1:
            wait_until_told(sequence)
        disttrain.barrier()
    tensor = ones()
    disttrain.all_reduce(tensor)
    assert tensor.tolist() == [size, size]


@on_ranks(3)
def test_a_call_of_one_rank_alone_which_nobody_waits_for_is_its_own_affair() -> None:
    disttrain.barrier()
    if disttrain.get_rank() == ALONE:
        with pytest.raises(ShapeError):
            disttrain.all_reduce(torch.ones(4)[::2])
        wait_until_told(2)
    for _ in range(3):
        disttrain.barrier()


@on_ranks(2)
def test_a_call_that_is_mended_at_once_is_the_one_that_counts() -> None:
    disttrain.barrier()
    tensor = torch.ones(4)[::2]
    try:
        disttrain.all_reduce(tensor if disttrain.get_rank() == ALONE else ones())
    except ShapeError:
        disttrain.all_reduce(tensor.contiguous())
    world = disttrain.current_world()
    world.refusals.tell()
    disttrain.barrier()
    assert not world.store.check([notice_key(2)])
    disttrain.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", list(ATTEMPTS))
def test_ranks_that_are_threads_do_not_wait_either(name: str, world_size: int) -> None:
    reason, attempt = ATTEMPTS[name]

    def run() -> None:
        group = disttrain.new_group()
        assert isinstance(group, disttrain.ProcessGroup)
        attempt(disttrain.get_rank() == ALONE, group)
        disttrain.barrier(group)

    with pytest.raises((DisttrainError, AttributeError)) as caught:
        run_threads(world_size, run)
    assert reason in f"{type(caught.value).__name__}: {caught.value}"
