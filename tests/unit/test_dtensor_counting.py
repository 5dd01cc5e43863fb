"""Operators that count, and those whose elements follow one another over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttrain
from disttrain.dtensor import DTensor, Shard
from disttrain.testing import run_threads
from tests.cases.shardings import check, collectives_of, laid_out, mesh_of, normal

WHOLES = [normal(5, 4), normal(2, 3, seed=1), normal(1, 2), torch.full((4,), 3.0)]


@pytest.mark.parametrize("whole", WHOLES, ids=lambda whole: str(tuple(whole.shape)))
def test_histograms(whole: torch.Tensor) -> None:
    # Parts that add up to a number do so but for rounding, which moves it to another bin.
    check(lambda x: torch.histc(x, 5), whole, num_choices=9, may_be_partial=False)
    check(lambda x: x.histc(bins=4, min=-1, max=1.5), whole, may_be_partial=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_range_that_is_not_finite_is_refused_by_all_ranks(value: float) -> None:
    def body() -> None:
        tensor = laid_out(torch.tensor([1.0, 2.0, value]), mesh_of((4,)), [Shard(0)])
        with pytest.raises(RuntimeError, match="not finite"):
            torch.histc(tensor, 4)

    run_threads(4, body)


@pytest.mark.parametrize("shape", [(5, 5), (6, 2), (1, 4), (0, 3)])
def test_traces(shape: tuple[int, int]) -> None:
    check(torch.trace, normal(*shape), num_choices=12, gradients=True)
    check(torch.trace, torch.ones(shape, dtype=torch.int32))


NUMBERS = torch.tensor([3, 0, 3, 7, 1, 0, 3])


def test_counts_of_numbers() -> None:
    check(torch.bincount, NUMBERS)
    check(lambda x: torch.bincount(x, minlength=11), NUMBERS)
    check(torch.bincount, NUMBERS, normal(7), may_be_partial=False)
    check(torch.bincount, NUMBERS, normal(7, dtype=torch.float32), may_be_partial=False)
    check(lambda x, w: torch.bincount(x, w, 2), NUMBERS, NUMBERS)
    check(torch.bincount, NUMBERS[:0])
    check(torch.bincount, NUMBERS[:2])


def test_negative_numbers_are_refused_by_all_ranks() -> None:
    def body() -> None:
        numbers = laid_out(torch.tensor([1, 2, -1]), mesh_of((3,)), [Shard(0)])
        with pytest.raises(RuntimeError, match="non-negative"):
            torch.bincount(numbers)

    run_threads(3, body)


MASK = normal(5, 4, seed=3) > 0


def test_values_where_a_mask_is() -> None:
    source = normal(4, 5, seed=4)
    check(lambda x, mask, values: x.masked_scatter(mask, values), normal(5, 4), MASK, source, gradients=True)
    check(
        lambda x, mask, values: x.masked_scatter(mask.unsqueeze(-1), values),
        normal(5, 4, 2),
        MASK,
        normal(40),
        num_choices=8,
        gradients=True,
    )
    check(lambda x, mask, values: x.masked_scatter(mask, values), normal(5, 4), MASK[0], source, gradients=True)
    check(lambda x, mask, values: x.masked_scatter(mask, values), normal(4), MASK, source, gradients=True)
    check(lambda x, mask, values: x.clone().masked_scatter_(mask, values), normal(5, 4), MASK, source)


def test_a_batch_that_is_cut_counts_and_moves_no_elements() -> None:
    def body() -> list[str]:
        mesh = mesh_of((2,))
        tensor, mask = (laid_out(each, mesh, [Shard(0)]) for each in (normal(5, 4), MASK))
        values = laid_out(normal(20), mesh, [Shard(0)]).redistribute(placements=None)
        return collectives_of(lambda: tensor.masked_scatter(mask, values))

    assert run_threads(2, body) == [["all_gather_into_tensor"]] * 2


def test_too_few_values_are_refused_by_all_ranks() -> None:
    def body() -> None:
        mesh = mesh_of((3,))
        tensor, mask = (laid_out(each, mesh, [Shard(0)]) for each in (normal(5, 4), MASK))
        with pytest.raises(RuntimeError, match="masked_scatter"):
            tensor.masked_scatter(mask, laid_out(normal(2), mesh, [Shard(0)]).redistribute(placements=None))

    run_threads(3, body)


@pytest.mark.parametrize("function", [torch.median, torch.nanmedian])
def test_a_median_needs_all_elements_and_says_nothing(function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(function, normal(5, 3), gradients=True)


def test_evaluation_saves_the_statistics_that_a_cpu_saves() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> Any:
        return torch.native_batch_norm(x, weight, None, mean.detach(), variance.detach(), False, 0.1, 1e-5)

    operands = (normal(3, 4, 2), normal(4), normal(4, seed=1), normal(4, seed=2).abs())
    check(function, *operands, gradients=True, may_be_partial=False, num_choices=12)


def test_slices_of_slices_that_two_axes_cut() -> None:
    def doubled(x: torch.Tensor) -> list[torch.Tensor]:
        return [part * part for part in x.split(2)]

    check(doubled, normal(6), num_choices=16, gradients=True)
    check(doubled, normal(6, 2), num_choices=16, gradients=True)


def test_a_dim_cut_by_blocks_stays_so_only_if_earlier_axes_do() -> None:
    check(lambda x: x.view(25, 5).cos(), normal(5, 5, 5), meshes=((2, 2),), num_choices=25, gradients=True)


def test_an_empty_batch_excuses_a_rank_without_channels() -> None:
    def body() -> tuple[int, ...]:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        images: DTensor = laid_out(torch.zeros(0, 1, 4, 5, 4), mesh, [Shard(1)])
        return tuple(torch.nn.functional.avg_pool3d(images, 2).full_tensor().shape)

    assert run_threads(2, body) == [(0, 1, 2, 2, 2)] * 2
