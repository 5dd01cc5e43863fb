"""Norms with running statistics under `fully_shard`: BatchNorm as under DDP, SyncBatchNorm as one process, and both in
averaged models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import disttrain
from disttrain.checkpoint import save
from disttrain.dtensor import DTensor
from disttrain.errors import ShapeError
from disttrain.fsdp2 import fully_shard
from disttrain.mesh import init_device_mesh
from disttrain.process_group import count_collectives
from disttrain.testing import RankPool

NUM_ROWS = 12


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.3), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(6, 2)).double()


def batches(num_batches: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(NUM_ROWS, 6, dtype=torch.float64, generator=generator) for _ in range(num_batches)]


def own_rows(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(disttrain.get_world_size())[disttrain.get_rank()]


def sharded(module: nn.Module, mesh_shape: Sequence[int] | None = None) -> nn.Module:
    mesh = None if mesh_shape is None else init_device_mesh("cpu", tuple(mesh_shape))
    for block in list(module.children())[:-1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def train(
    module: nn.Module, rows: Callable[[torch.Tensor], torch.Tensor], after: Callable[[], None] = lambda: None
) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for batch in batches():
        module(rows(batch)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def values(module: nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, whole."""
    state = module.state_dict().values()
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in state]


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(values(found), values(expected), rtol=1e-10, atol=1e-12)


def assert_alike(tensors: Sequence[torch.Tensor]) -> None:
    """On all ranks."""
    everyone: list[Any] = [None] * disttrain.get_world_size()
    disttrain.all_gather_object(everyone, list(tensors))
    assert all(torch.equal(left, right) for other in everyone for left, right in zip(other, tensors, strict=True))


def batch_norm_as_ddps(mesh_shape: Sequence[int] | None) -> None:
    own, ddp = sharded(model(), mesh_shape), DistributedDataParallel(model())
    train(own, own_rows, lambda: assert_alike(list(own.buffers())))
    train(ddp, own_rows)
    for module in (own, ddp):
        module.eval()
    rows = batches(1)[0]
    torch.testing.assert_close(own(rows), ddp(rows), rtol=1e-10, atol=1e-12)
    # DDP's other ranks have rank 0's from the next forward on, as there just now.
    assert_same(own, ddp.module)


@pytest.mark.parametrize(("num_ranks", "mesh_shape"), [(2, None), (3, None), (4, (2, 2)), (2, (2, 1)), (1, None)])
def test_running_statistics_are_rank_0s_as_under_ddp(
    rank_pool: RankPool, num_ranks: int, mesh_shape: Sequence[int] | None
) -> None:
    rank_pool.run(num_ranks, batch_norm_as_ddps, {"mesh_shape": mesh_shape})


def saved_without_a_warning(folder: str) -> None:
    own = sharded(model())
    train(own, own_rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save({"model": own}, Path(folder) / "save")


def test_a_checkpoint_has_statistics_that_all_ranks_have(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, saved_without_a_warning, {"folder": str(tmp_path)})


def frozen_norms_send_nothing() -> None:
    own = sharded(model())
    for module in own.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    before = [buffer.clone() for buffer in own.buffers()]
    with count_collectives() as counted:
        own(own_rows(batches(1)[0]))
    assert "broadcast" not in str(counted)
    assert all(map(torch.equal, before, own.buffers()))


def sync_batch_norm_as_one_process(mesh_shape: Sequence[int] | None) -> None:
    plain = model()
    own = sharded(nn.SyncBatchNorm.convert_sync_batchnorm(model()), mesh_shape)
    train(plain, lambda batch: batch)
    train(own, own_rows, lambda: assert_alike(list(own.buffers())))
    assert_same(own, plain)
    for module in (own, plain):
        module.eval()
    torch.testing.assert_close(own(batches(1)[0]), plain(batches(1)[0]), rtol=1e-10, atol=1e-12)
    copied = copy.deepcopy(own)
    assert_same(copied, own)


@pytest.mark.parametrize(("num_ranks", "mesh_shape"), [(2, None), (3, None), (4, (2, 2)), (1, None)])
def test_sync_batch_norm_has_a_single_processs_values(
    rank_pool: RankPool, num_ranks: int, mesh_shape: Sequence[int] | None
) -> None:
    rank_pool.run(num_ranks, sync_batch_norm_as_one_process, {"mesh_shape": mesh_shape})


def uneven_batches() -> None:
    """Images, in parts of other sizes, with other options; their inputs' gradients, too."""
    images = torch.randn(6, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = images.split([1, 5, 0])
    for options in ({}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}):
        plain = nn.BatchNorm2d(3, **options).double()
        own = fully_shard(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)))
        whole = images.clone().requires_grad_()
        part = parts[disttrain.get_rank()].clone().requires_grad_()
        for _ in range(2):
            expected, found = plain(whole), own(part)
        torch.testing.assert_close(found, expected.split([1, 5, 0])[disttrain.get_rank()], rtol=1e-10, atol=1e-12)
        weights = torch.arange(expected.numel(), dtype=torch.float64).view_as(expected).sin()
        (expected * weights).sum().backward()
        (found * weights.split([1, 5, 0])[disttrain.get_rank()]).sum().backward()
        assert whole.grad is not None
        assert part.grad is not None
        torch.testing.assert_close(part.grad, whole.grad.split([1, 5, 0])[disttrain.get_rank()], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(list(own.buffers()), list(plain.buffers()), rtol=1e-10, atol=1e-12)
    with pytest.raises(ShapeError, match=r"SyncBatchNorm: the input has shape \(3,\)"):
        own(torch.ones(3, dtype=torch.float64))


def test_sync_batch_norm_takes_batches_of_other_sizes(rank_pool: RankPool) -> None:
    rank_pool.run(3, uneven_batches)


def averaged_models(kind: str) -> None:
    """`AveragedModel` and `update_bn`, against one process that sees what all ranks see."""
    options: dict[str, Any] = {
        "mean": {},
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        "buffers": {"use_buffers": True},
    }[kind]
    plain, own = model(), sharded(nn.SyncBatchNorm.convert_sync_batchnorm(model()))
    averaged = [AveragedModel(module, **options) for module in (plain, own)]
    for average, rows in zip(averaged, (lambda batch: batch, own_rows), strict=True):
        train(average.module, rows)
    for module, average, rows in zip((plain, own), averaged, (lambda batch: batch, own_rows), strict=True):
        train(module, rows, lambda average=average, module=module: average.update_parameters(module))
        update_bn([rows(batch) for batch in batches(4)], average)
    assert_same(averaged[1].module, averaged[0].module)
    for average in averaged:
        average.eval()
    torch.testing.assert_close(
        averaged[1](own_rows(batches(1)[0])), own_rows(averaged[0](batches(1)[0])), rtol=1e-10, atol=1e-12
    )
    assert list(chain(averaged[1].buffers()))


@pytest.mark.parametrize("kind", ["mean", "ema", "buffers"])
def test_averaged_models_are_those_of_one_process(rank_pool: RankPool, kind: str) -> None:
    rank_pool.run(2, averaged_models, {"kind": kind})


def update_bn_of_the_first_rank() -> None:
    own, plain = sharded(model()), model()
    update_bn([own_rows(batch) for batch in batches(4)], own)
    update_bn([batch.chunk(disttrain.get_world_size())[0] for batch in batches(4)], plain)
    assert_same(own, plain)
    assert_alike(list(own.buffers()))


def test_update_bn_has_the_first_ranks_statistics(rank_pool: RankPool) -> None:
    rank_pool.run(2, update_bn_of_the_first_rank)


def test_norms_that_do_not_train_cost_nothing(rank_pool: RankPool) -> None:
    rank_pool.run(2, frozen_norms_send_nothing)
