"""A plan is not taken for calls that it was not made for: other numbers, another default dtype, rule or mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import disttrain
from disttrain.dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    register_sharding,
)
from disttrain.dtensor.rules import CUSTOM
from disttrain.dtensor.spec.layout import forget_plans
from disttrain.errors import LayoutError
from disttrain.testing import run_threads
from tests.cases.shardings import check, mesh_of, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")

X, Y = normal(5, 3), normal(5, 3, seed=1)

SERIES: dict[str, list[Callable[..., Any]]] = {
    "histogram": [
        lambda x, _, bounds=bounds: torch.histc(x, *bounds)
        for bounds in ((4, -1.0, 1.0), (4, -2.0, 2.0), (4, -2.0, 1.0), (6, 0.0, 0.0))
    ],
    "bounds": [lambda x, _, low=low: x.clamp(low, low + 1) for low in (0.0, -1.0, 0.5)],
    "threshold": [lambda x, _, low=low: functional.threshold(x, low, 7.0) for low in (0.0, -1.0, 0.5)],
    "border": [lambda x, _, value=value: functional.pad(x, (1, 1), value=value) for value in (0.0, 1.0, 2.0)],
    "scaled sum": [lambda x, y, alpha=alpha: torch.add(x, y, alpha=alpha) for alpha in (1, 2, 0.5, 3.0)],
    "norm": [lambda x, _, order=order: torch.linalg.vector_norm(x, order) for order in (1.0, 2, 3.0, float("inf"))],
    "bounded rows": [lambda x, _, limit=limit: torch.renorm(x, 2.0, 0, limit) for limit in (1.0, 2.0, 0.3)],
    "deviation": [lambda x, _, less=less: torch.std(x, 0, correction=less) for less in (1, 0, 2, 0.5)],
    "layer norm": [lambda x, _, eps=eps: functional.layer_norm(x, (3,), eps=eps) for eps in (1.0, 2.0)],
    "distances": [lambda x, y, order=order: torch.cdist(x, y, p=order) for order in (1.0, 2.0, 3.0)],
    "power": [lambda x, _, power=power: x.abs().pow(power) for power in (1, 2, 0.5, 3.0)],
    "full": [lambda x, _, value=value: torch.full_like(x, value) for value in (1.0, 2.0)],
}


@pytest.mark.parametrize("name", SERIES)
def test_the_same_operator_with_other_numbers(name: str) -> None:
    series = SERIES[name]
    for order in (series, series[::-1]):
        check(
            lambda x, y, order=order: [function(x, y) for function in order],
            *(X, Y),
            meshes=((2,), (2, 2)),
            num_choices=3,
        )


def test_another_default_dtype() -> None:
    counts = torch.arange(6)
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x / 2,
        lambda x: x * 2.0,
        torch.sqrt,
        lambda x: x.sum() / 2,
        lambda x: x.true_divide(x + 1),
    ]

    def body() -> None:
        tensor = distribute_tensor(counts, mesh_of((1,)), [Shard(0)])
        for function in functions:
            for size in (6, 4):
                part = tensor[:size]
                for dtype in (torch.float32, torch.float64, torch.float32):
                    torch.set_default_dtype(dtype)
                    result = function(part)
                    assert isinstance(result, DTensor)
                    assert (result.dtype, result._spec.dtype, result.to_local().dtype) == (dtype, dtype, dtype)
                    torch.testing.assert_close((result + result).full_tensor(), 2 * function(counts[:size]))

    try:
        run_threads(1, body)
    finally:
        torch.set_default_dtype(torch.float32)


@torch.library.custom_op("disttrain_tests::reversed", mutates_args=())
def backwards(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


backwards.register_fake(torch.empty_like)


def test_another_mode() -> None:
    def body() -> None:
        tensor = distribute_tensor(X, mesh_of((2,)), [Shard(0)])
        for _ in range(2):
            with implicit_replication():
                torch.testing.assert_close((tensor * X).full_tensor(), X * X)
            with pytest.raises(LayoutError, match="meets a plain tensor"):
                tensor * X
            torch.testing.assert_close(backwards(tensor).full_tensor(), X.flip(0))
            with implicit_replication(False), pytest.raises(LayoutError, match="forbids"):
                backwards(tensor)

    run_threads(2, body)


def test_another_rule() -> None:
    op = torch.ops.aten.sinc.default

    def body() -> None:
        tensor = distribute_tensor(X, mesh_of((2,)), [Shard(0)])
        assert tensor.sinc().placements == (Shard(0),)
        for placement in (Replicate(), Shard(1)):
            disttrain.barrier()
            register_sharding(op)(lambda x, placement=placement: [([placement], [placement])])
            disttrain.barrier()
            result = tensor.sinc()
            assert result.placements == (placement,)
            torch.testing.assert_close(result.full_tensor(), X.sinc())

    try:
        run_threads(2, body)
    finally:
        del CUSTOM[op]
        forget_plans()
