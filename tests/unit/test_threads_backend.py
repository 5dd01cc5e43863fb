"""Ranks as threads: values, and what is said when they don't fit together."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

import disttrain
from disttrain import ReduceOp
from disttrain.errors import BackendError, CollectiveMismatchError, CollectiveTimeoutError, GroupError
from disttrain.store import HashStore
from disttrain.testing import run_threads


def test_every_reduction() -> None:
    def body() -> list[float]:
        values = []
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            tensor = torch.tensor([disttrain.get_rank() + 1.0])
            disttrain.all_reduce(tensor, op)
            values.append(tensor.item())
        return values

    assert run_threads(4, body) == [[10.0, 2.5, 24.0, 1.0, 4.0]] * 4


def test_messages_arrive_in_order_and_by_tag() -> None:
    def body() -> list[float]:
        out = torch.zeros(3)
        if disttrain.get_rank() == 0:
            works = [disttrain.isend(torch.tensor([float(value)]), 1, tag=value % 2) for value in (1, 2, 3)]
            return [float(work.wait()) for work in works]
        for place, tag in enumerate((1, 0, 1)):
            disttrain.recv(out[place : place + 1], 0, tag=tag)
        return out.tolist()

    assert run_threads(2, body)[1] == [1.0, 2.0, 3.0]


def test_a_deadlock_is_reported_at_once() -> None:
    def body() -> None:
        if disttrain.get_rank() < 2:
            disttrain.all_reduce(torch.ones(2))

    started = time.monotonic()
    with pytest.raises(
        CollectiveMismatchError, match=r"deadlock: rank 0 waits in all_reduce SUM float32\[2\]; rank 1 waits"
    ):
        run_threads(3, body)
    assert time.monotonic() - started < 30


def test_both_receiving_is_a_deadlock() -> None:
    def body() -> None:
        disttrain.recv(torch.ones(1), 1 - disttrain.get_rank())

    with pytest.raises(CollectiveMismatchError, match="deadlock: rank 0 waits in message from group rank 1 to 0"):
        run_threads(2, body)


def test_different_calls_are_named() -> None:
    def body() -> None:
        if disttrain.get_rank() == 1:
            disttrain.barrier()
        else:
            disttrain.all_reduce(torch.ones(2))

    with pytest.raises(CollectiveMismatchError, match=r"group rank 0 called all_reduce.*; group rank 1 called barrier"):
        run_threads(2, body)


def test_a_rank_that_fails_comes_before_those_that_wait_for_it() -> None:
    def body() -> None:
        if disttrain.get_rank() == 2:
            raise ValueError("bad data")
        disttrain.barrier()

    with pytest.raises(ValueError, match="bad data") as caught:
        run_threads(3, body)
    assert caught.value.__notes__ == ["on rank 2 of 3 threads"]


def test_a_rank_that_computes_too_long_is_a_timeout() -> None:
    def body() -> None:
        if disttrain.get_rank() == 0:
            disttrain.all_reduce(torch.ones(1), async_op=True).wait(timeout=0.05)
        else:
            time.sleep(0.3)

    with pytest.raises(CollectiveTimeoutError, match="only group ranks 0 of 2 came"):
        run_threads(2, body)


def test_outside_of_run_threads_it_says_who_makes_the_world() -> None:
    world = disttrain.World(HashStore(), 0, 1, backend="threads", timeout_s=1)
    with pytest.raises(BackendError, match=r"Let disttrain\.testing\.run_threads make the world"):
        world.default_group.backend("all_reduce", "cpu")


def test_collectives_write_beside_autograd() -> None:
    def body() -> tuple[list[float], bool]:
        weight = torch.ones(2, requires_grad=True)
        disttrain.all_reduce(weight)
        total = (weight * 2).sum()
        history = total.grad_fn
        disttrain.all_reduce(total)
        return [*weight.tolist(), total.item()], total.grad_fn is history

    assert run_threads(2, body) == [([2.0, 2.0, 16.0], True)] * 2


def test_a_mesh_makes_its_group_anew_once_it_has_been_destroyed() -> None:
    def body() -> float | None:
        if disttrain.get_rank() == 2:
            return None
        group = disttrain.DeviceMesh("cpu", [0, 1]).get_group()
        disttrain.destroy_process_group(group)
        with pytest.raises(GroupError, match="destroyed already"):
            disttrain.destroy_process_group(group)
        tensor = torch.ones(())
        disttrain.all_reduce(tensor, group=disttrain.DeviceMesh("cpu", [0, 1]).get_group())
        return tensor.item()

    assert run_threads(3, body) == [2.0, 2.0, None]


def test_torchs_name_for_the_default_group() -> None:
    def body() -> tuple[bool, list[float]]:
        tensor = torch.ones(2)
        disttrain.all_reduce(tensor, group=disttrain.group.WORLD)
        return disttrain.group.WORLD is disttrain.current_world().default_group, tensor.tolist()

    assert run_threads(2, body) == [(True, [2.0, 2.0])] * 2
    assert disttrain.group.WORLD is None


def test_what_a_failed_backward_leaves_goes_with_its_rank() -> None:
    """Else it would go when Python has forgotten the thread, and abort a process that ends."""
    gone_in: list[str] = []

    class Kept(torch.Tensor):
        pass

    def refuse(_: torch.Tensor) -> None:
        raise ValueError("no")

    def fail() -> None:
        x = torch.ones(2, requires_grad=True).as_subclass(Kept)
        waiting, refused = x.clone(), x * 2
        refused.register_hook(refuse)
        weights = [torch.ones(2).as_subclass(Kept) for _ in range(2)]
        refs.extend(
            weakref.ref(weight, lambda _: gone_in.append(threading.current_thread().name)) for weight in weights
        )
        with pytest.raises(ValueError, match="no"):
            torch.autograd.backward([refused, waiting], weights)

    refs: list[weakref.ref[torch.Tensor]] = []
    run_threads(1, fail)
    assert gone_in == ["rank 0", "rank 0"]
