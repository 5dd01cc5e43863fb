"""Joining a job: over an address, from the environment, several times, and when ranks don't fit together."""

from __future__ import annotations

import os
import socket

import pytest
import torch

import disttrain
from disttrain.errors import GroupError, RendezvousError, StoreConnectionError
from disttrain.process_group.joining.rendezvous import RendezvousInfo, join
from disttrain.store import PrefixStore
from disttrain.testing.pytest_plugin import on_ranks


def free_port_for_all() -> int:
    """A port that rank 0 has found free, known to all ranks."""
    port = torch.zeros(1, dtype=torch.int64)
    if disttrain.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port[0] = probe.getsockname()[1]
    disttrain.all_reduce(port)  # After a broadcast who has it may leave while others have not met it yet.
    return int(port.item())


def sum_of_ranks() -> float:
    tensor = torch.tensor([float(disttrain.get_rank())])
    disttrain.all_reduce(tensor)
    return tensor.item()


@on_ranks(2, 3)
def test_over_an_address_where_rank_0_starts_the_store() -> None:
    rank, size, port = disttrain.get_rank(), disttrain.get_world_size(), free_port_for_all()
    for _ in range(3):
        disttrain.destroy_process_group()
        assert not disttrain.is_initialized()
        disttrain.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=30)
        assert sum_of_ranks() == size * (size - 1) / 2


@on_ranks(2)
def test_from_the_environment() -> None:
    rank, port = disttrain.get_rank(), free_port_for_all()
    disttrain.destroy_process_group()
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ.update(variables)
    try:
        disttrain.init_process_group()
        assert (disttrain.get_rank(), disttrain.get_world_size(), sum_of_ranks()) == (rank, 2, 1.0)
        assert disttrain.get_backend_config().startswith("cpu:gloo")
        disttrain.barrier()
    finally:
        for name in variables:
            del os.environ[name]


@on_ranks(3)
def test_ranks_that_disagree_on_the_size_are_told_so_on_every_rank() -> None:
    rank, store = disttrain.get_rank(), disttrain.current_world().store
    scoped = PrefixStore("disagreeing", store)
    size = 4 if rank == 2 else 3
    kept = disttrain.current_world()
    with pytest.raises(RendezvousError, match=r"came with .*world_size.*others with"):
        join(scoped, RendezvousInfo(rank, size), timeout_s=60)
    assert disttrain.current_world() is kept


@on_ranks(1)
def test_nobody_at_the_address_is_an_error_within_the_timeout() -> None:
    port = free_port_for_all()
    disttrain.destroy_process_group()
    with pytest.raises(StoreConnectionError, match=str(port)):
        disttrain.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=0.5)
    assert not disttrain.is_initialized()


@on_ranks(1)
def test_before_joining_every_function_says_what_to_do() -> None:
    disttrain.destroy_process_group()
    for function in (disttrain.get_rank, disttrain.barrier, disttrain.new_group, disttrain.destroy_process_group):
        with pytest.raises(GroupError, match=r"Call disttrain\.init_process_group"):
            function()
