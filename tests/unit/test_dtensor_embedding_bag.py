"""Bags of rows: values and gradients are those of plain tensors, also where the table is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from disttrain.dtensor import Partial, Placement, Replicate, Shard
from disttrain.errors import LayoutError
from disttrain.testing import run_threads
from tests.cases.shardings import check, collectives_of, laid_out, mesh_of, normal

INDICES = torch.tensor([1, 2, 3, 2, 5, 6, 1])
OFFSETS, ENDS = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 2, 2, 7])


def bag(**options: Any) -> Any:
    return lambda table, indices, offsets: functional.embedding_bag(indices, table, offsets, **options)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
# Of float32 torch has another kernel, whatever the options.
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"padding_idx": 2}, torch.float64),
        ({"include_last_offset": True}, torch.float64),
        ({"include_last_offset": True, "padding_idx": 2}, torch.float32),
    ],
    ids=str,
)
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
    check(bag(mode=mode), normal(7, 1), INDICES, OFFSETS, num_choices=12, gradients=True, may_be_partial=False)


ROWS = torch.tensor([[1, 2], [3, 2], [5, 6], [1, 1], [0, 2], [6, 5]])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:5], ROWS[:, :1]], ids=["even", "uneven", "ones"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}], ids=str)
def test_bags_of_equal_size(mode: str, rows: torch.Tensor, options: dict[str, Any]) -> None:
    def of_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return functional.embedding_bag(rows, table, mode=mode, **options)

    check(of_rows, normal(7, 5), rows, num_choices=5, gradients=True, may_be_partial=False)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:5]], ids=["even", "uneven"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
def test_weighted_bags_of_equal_size(rows: torch.Tensor, options: dict[str, Any]) -> None:
    def weighted(table: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return functional.embedding_bag(rows, table, mode="sum", per_sample_weights=weights, **options)

    if "scale_grad_by_freq" in options:
        check(
            lambda table, rows: functional.embedding_bag(rows, table, **options),
            normal(7, 5),
            rows,
            num_choices=5,
            gradients=True,
            may_be_partial=False,
        )
    else:
        check(weighted, normal(7, 5), rows, normal(*rows.shape), num_choices=8, gradients=True, may_be_partial=False)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_module_of_bags(mode: str) -> None:
    def called(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        # Of each rank's own: a call puts its table into the module, and ranks are threads.
        module = torch.nn.EmbeddingBag(7, 5, mode=mode, dtype=torch.float64)
        return torch.func.functional_call(module, {"weight": table}, (rows,))

    check(called, normal(7, 5), ROWS, num_choices=8, gradients=True, may_be_partial=False)


def test_a_batch_that_is_cut_moves_nothing() -> None:
    def body() -> list[str]:
        mesh = mesh_of((2,))
        table = laid_out(normal(7, 4), mesh, [Replicate()]).requires_grad_()
        rows, weights = laid_out(ROWS, mesh, [Shard(0)]), laid_out(normal(*ROWS.shape), mesh, [Shard(0)])
        weights.requires_grad_()

        def train() -> None:
            sums = functional.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)
            assert sums.placements == (Shard(0),)
            sums.backward(sums.detach())
            assert (table.grad.placements, weights.grad.placements) == ((Partial(),), (Shard(0),))

        return collectives_of(train)

    assert run_threads(2, body) == [[]] * 2


def test_plain_offsets_of_other_bags_are_refused() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        table, indices = laid_out(normal(7, 4), mesh, [Replicate()]), laid_out(INDICES, mesh, [Replicate()])
        with pytest.raises(LayoutError, match="a DTensor meets a plain tensor"):
            functional.embedding_bag(indices, table, OFFSETS)
        with pytest.raises(LayoutError, match="a DTensor meets a plain tensor"):
            functional.embedding_bag(ROWS, table)

    run_threads(2, body)


@pytest.mark.parametrize("layout", [Shard(0), Shard(1)], ids=str)
def test_a_cut_table_moves_nothing(layout: Placement) -> None:
    def body() -> list[str]:
        mesh = mesh_of((2,))
        table = laid_out(normal(7, 4), mesh, [layout])
        places = laid_out(torch.tensor([[0, 1], [2, 6]]), mesh, [Replicate()])
        return collectives_of(lambda: functional.embedding_bag(places, table, mode="sum"))

    assert run_threads(2, body) == [[]] * 2
