"""Losses of DTensors: means over uneven and empty parts, targets of other ranks' classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from disttrain.dtensor import Partial, Replicate, Shard
from disttrain.testing import run_threads
from tests.cases.shardings import check, collectives_of, laid_out, mesh_of, normal

A, B = normal(5, 3), normal(5, 3, seed=1)
TARGET = torch.tensor([2, 0, -100, 1, 1])

LOSSES: dict[str, Callable[..., Any]] = {
    "mse": functional.mse_loss,
    "huber": functional.huber_loss,
    "smooth l1": functional.smooth_l1_loss,
    "l1": functional.l1_loss,
    "soft margin": lambda x, y, reduction: functional.soft_margin_loss(x, y.sign().detach(), reduction=reduction),
    "binary cross entropy": lambda x, y, reduction: functional.binary_cross_entropy(
        x.sigmoid(), y.sigmoid().detach(), reduction=reduction
    ),
    "binary cross entropy of logits": lambda x, y, reduction: functional.binary_cross_entropy_with_logits(
        x, y.sigmoid().detach(), reduction=reduction
    ),
}

LOSSES_BY_MEAN = {name: functools.partial(loss, reduction="mean") for name, loss in LOSSES.items()}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_by_element(name: str, reduction: str) -> None:
    check(lambda x, y: LOSSES[name](x, y, reduction=reduction), A, B, gradients=True, num_choices=2)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_means_over_fewer_rows_than_ranks(name: str, num_rows: int) -> None:
    check(LOSSES_BY_MEAN[name], A[:num_rows], B[:num_rows], meshes=((2,), (4,), (2, 2)), gradients=True, num_choices=4)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_negative_log_likelihood(reduction: str) -> None:
    def weighted(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(scores, target, weight.square().detach(), reduction=reduction)

    def ignoring(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(scores, target, ignore_index=1, reduction=reduction)

    def plain(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(scores, target, reduction=reduction)

    check(weighted, A, TARGET, normal(3), gradients=True, num_choices=8)
    check(ignoring, A, TARGET.abs() % 3, gradients=True, num_choices=3)
    check(plain, A[0], torch.tensor(1), gradients=True, num_choices=3)
    target = torch.randint(0, 4, (3, 2, 3), generator=torch.Generator().manual_seed(0))
    check(plain, normal(3, 4, 2, 3), target, gradients=True, num_choices=3)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_margins_of_rows(reduction: str) -> None:
    labels = torch.tensor([[2, 0, -1]] * 5)
    check(lambda x, y: functional.multi_margin_loss(x, y, reduction=reduction), A, TARGET.abs() % 3)
    check(lambda x, y: functional.multilabel_margin_loss(x, y, reduction=reduction), A, labels)


def test_broadcast_target() -> None:
    check(torch.ops.aten.mse_loss, normal(1, 3), B, num_choices=12)


def test_one_ranks_wrong_target_is_everyones_error() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        for scores in (Shard(0), Shard(1)):
            given = laid_out(A, mesh, [scores])
            target = laid_out(torch.tensor([2, 0, 1, 1, 3]), mesh, [Shard(0)])
            with pytest.raises(IndexError, match="3 classes"):
                functional.nll_loss(given, target)

    run_threads(2, body)


def test_what_losses_move() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        x, y = laid_out(A, mesh, [Shard(0)]), laid_out(B, mesh, [Shard(0)])
        assert collectives_of(lambda: functional.mse_loss(x, y)) == []
        assert functional.mse_loss(x, y).placements == (Partial(),)
        for scores, target in ((Shard(0), Shard(0)), (Shard(1), Replicate())):
            given, wanted = laid_out(A, mesh, [scores]), laid_out(TARGET, mesh, [target])

            def mean(given: torch.Tensor = given, wanted: torch.Tensor = wanted) -> torch.Tensor:
                return functional.nll_loss(given, wanted)

            assert collectives_of(mean) == ["all_reduce"]

    run_threads(2, body)
