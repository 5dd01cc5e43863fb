"""Views that cross ranks, over a real transport and with every kind of dtype."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain.dtensor import Replicate, Shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.dtensors import check_same, counted, laid

DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def written(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1:].copy_(tensor[:-1].clone())
    tensor[0].copy_(tensor[2])
    tensor.view(-1)[3:7].zero_()
    return tensor


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_cross_ranks(dtype: torch.dtype) -> None:
    mesh = disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),))
    whole = counted(5, 4, dtype=dtype)
    for dim in (0, 1):
        layout = [Shard(dim)]
        check_same(written, [whole], mesh, [layout], with_gradients=False)
        for view in (
            lambda t: t[2],
            lambda t: t[1:, ::2],
            lambda t: t.split([1, 3, 1]),
            lambda t: torch.cat([t, t[:2]]),
            lambda t: t.view(2, 10),
            lambda t: t.unbind(1),
        ):
            check_same(view, [whole], mesh, [layout], with_gradients=dtype == torch.float64)


@on_ranks(4)
def test_writes_through_views_on_two_axes() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2))
    for layout in ((Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Replicate())):
        tensor = laid(counted(5, 4), mesh, layout)
        row = tensor[1]
        tensor.mul_(2)
        row.add_(1)
        expected = counted(5, 4) * 2
        expected[1].add_(1)
        assert torch.equal(tensor.full_tensor(), expected)
        assert torch.equal((row + 0).full_tensor(), expected[1])
