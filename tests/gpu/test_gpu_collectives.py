"""Collectives on CUDA and CPU tensors of one group, over NCCL and Gloo."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain import ReduceOp
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS


def own_device() -> torch.device:
    return disttrain.current_world().device


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_both_devices_in_one_group(dtype: str) -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    assert disttrain.get_backend() == "cpu:gloo,cuda:nccl"
    for device in (own_device(), torch.device("cpu")):
        mine = (torch.arange(4, device=device) + rank).to(getattr(torch, dtype))
        whole = mine.clone()
        disttrain.all_reduce(whole)
        expected = [value * size + size * (size - 1) // 2 for value in range(4)]
        assert whole.tolist() == expected
        gathered = mine.new_empty(4 * size)
        disttrain.all_gather_into_tensor(gathered, mine)
        assert gathered.view(size, 4)[:, 0].tolist() == list(range(size))
        part = mine.new_empty(4)
        disttrain.reduce_scatter_tensor(part, mine.repeat(size), ReduceOp.MAX)
        assert part.tolist() == [value + size - 1 for value in range(4)]
        disttrain.broadcast(mine, size - 1)
        assert mine.tolist() == [value + size - 1 for value in range(4)]
        disttrain.barrier()


@on_ranks(NUM_GPU_RANKS)
def test_asynchronous_work_orders_the_stream() -> None:
    size = disttrain.get_world_size()
    tensors = [torch.full((1 << 20,), float(step), device=own_device()) for step in range(8)]
    works = [disttrain.all_reduce(tensor, async_op=True) for tensor in tensors]
    for step, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None
        work.wait()
        tensor.mul_(2)
        assert tensor.eq(2.0 * step * size).all()


@on_ranks(NUM_GPU_RANKS)
def test_messages() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    if size == 1:
        return
    mine, received = torch.full((3,), float(rank), device=own_device()), torch.empty(3, device=own_device())
    if rank % 2 == 0 and rank + 1 < size:
        disttrain.send(mine, rank + 1)
        disttrain.recv(received, rank + 1)
        assert received.eq(rank + 1).all()
    elif rank % 2 == 1:
        disttrain.recv(received, rank - 1)
        disttrain.send(mine, rank - 1)
        assert received.eq(rank - 1).all()


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_factors_of_sums(dtype: str) -> None:
    """NCCL by torch 2.11 sums up zeros in bfloat16."""
    size = disttrain.get_world_size()
    for factor in (0.5, 2.0, 0.25):
        mine = torch.full((8,), 3.0, dtype=getattr(torch, dtype), device=own_device())
        disttrain.all_reduce(mine, disttrain.premul_sum(factor))
        assert mine.tolist() == [3.0 * factor * size] * 8
