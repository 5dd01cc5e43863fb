"""Bags of rows: values and gradients are those of plain tensors, also where the table is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from disttrain.dtensor import Placement, Replicate, Shard, implicit_replication
from disttrain.testing import run_threads
from tests.sharding_cases import check, collectives_of, laid_out, mesh_of, normal

INDICES = torch.tensor([1, 2, 3, 2, 5, 6, 1])
OFFSETS, ENDS = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 2, 2, 7])


def bag(**options: Any) -> Any:
    return lambda table, indices, offsets: functional.embedding_bag(indices, table, offsets, **options)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"include_last_offset": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_bags(mode: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    check(
        bag(mode=mode, **options),
        normal(7, 5, dtype=dtype),
        INDICES,
        ENDS if "include_last_offset" in options else OFFSETS,
        num_choices=8,
        gradients=True,
        may_be_partial=False,
    )


def test_weighted_bags() -> None:
    def weighted(table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> Any:
        return functional.embedding_bag(indices, table, offsets, mode="sum", per_sample_weights=weights)

    operands = (normal(7, 5), INDICES, OFFSETS, normal(7))
    check(weighted, *operands, num_choices=12, gradients=True, may_be_partial=False)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_few_features(mode: str) -> None:
    check(bag(mode=mode), normal(7, 1), INDICES, OFFSETS, num_choices=27, gradients=True, may_be_partial=False)


@pytest.mark.parametrize("layout", [Shard(0), Shard(1)], ids=str)
def test_a_cut_table_moves_nothing(layout: Placement) -> None:
    def body() -> list[str]:
        mesh = mesh_of((2,))
        table = laid_out(normal(7, 4), mesh, [layout])
        places = laid_out(torch.tensor([[0, 1], [2, 6]]), mesh, [Replicate()])
        with implicit_replication():
            return collectives_of(lambda: functional.embedding_bag(places, table, mode="sum"))

    assert run_threads(2, body) == [[]] * 2
