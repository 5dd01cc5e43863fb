"""The vocabulary-parallel loss of DTensors, judged by F.cross_entropy of the whole; ranks are threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.dtensor import CommDebugMode, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.errors import GroupError, LayoutError
from disttrain.testing import run_threads
from disttrain.tp.loss.context import loss_parallel
from disttrain.tp.loss.vocab_parallel import vocab_parallel_cross_entropy
from tests.cases.shardings import mesh_of, normal

SHAPES = ((7,), (5, 7), (5, 7, 2), (2, 7, 2, 3))
REDUCTIONS = ("mean", "sum", "none")
PLACEMENTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "classes": ((3,), [Shard(1)]),
    "beside copies": ((2, 2), [Replicate(), Shard(1)]),
    "within a cut batch": ((2, 2), [Shard(0), Shard(1)]),
    "around a cut batch": ((2, 2), [Shard(1), Shard(0)]),
}


def drawn(shape: tuple[int, ...], of_probabilities: bool) -> torch.Tensor:
    if of_probabilities:
        return normal(*shape, seed=1).softmax(min(1, len(shape) - 1))
    batch = shape[:1] * (len(shape) > 1) + shape[2:]
    return torch.randint(0, 7, batch, generator=torch.Generator().manual_seed(0))


def compare(
    mesh_shape: tuple[int, ...],
    placements: list[Placement],
    shape: tuple[int, ...],
    target: torch.Tensor,
    **options: Any,
) -> None:
    """Values and gradients are those of the whole, with the target cut in the loss's way, and given whole."""
    whole = normal(*shape).requires_grad_()
    expected = F.cross_entropy(whole, target, **options)
    weights = normal(*expected.shape, seed=9)
    (expected * weights).sum().backward()

    def body() -> None:
        mesh = mesh_of(mesh_shape)
        replicated = [Replicate()] * mesh.ndim
        goal: torch.Tensor = distribute_tensor(target, mesh, replicated)
        logits = distribute_tensor(whole.detach(), mesh, placements).detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, goal, **options)
        assert isinstance(loss, DTensor)
        torch.testing.assert_close(loss.full_tensor(), expected.detach())
        (loss * distribute_tensor(weights, mesh, replicated)).sum().backward()
        assert isinstance(logits.grad, DTensor)
        assert logits.grad.placements == tuple(placements)
        torch.testing.assert_close(logits.grad.full_tensor(), whole.grad)

    run_threads(math.prod(mesh_shape), body)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("of_probabilities", [False, True])
def test_logits_that_lie_in_any_way(name: str, of_probabilities: bool) -> None:
    mesh_shape, placements = PLACEMENTS[name]
    for shape in SHAPES:
        if len(shape) == 1 and Shard(0) in placements:
            continue
        cut = [Shard(0) if len(shape) == 1 and placement == Shard(1) else placement for placement in placements]
        for reduction in REDUCTIONS:
            compare(mesh_shape, cut, shape, drawn(shape, of_probabilities), reduction=reduction)
    weight = normal(7, seed=3).square()
    compare(mesh_shape, placements, (5, 7), drawn((5, 7), of_probabilities), weight=weight, label_smoothing=0.2)


def test_how_the_loss_lies() -> None:
    def body() -> None:
        mesh = mesh_of((2, 2))
        logits = distribute_tensor(normal(6, 7, 3), mesh, [Shard(2), Shard(1)])
        part = torch.zeros(6, 2 if mesh.get_local_rank(0) == 0 else 1, dtype=torch.int64)
        weight = distribute_tensor(torch.ones(7), mesh, [Replicate(), Shard(0)])
        losses = {
            reduction: vocab_parallel_cross_entropy(logits, part, weight=weight, reduction=reduction)
            for reduction in REDUCTIONS
        }
        found = {reduction: loss.placements for reduction, loss in losses.items()}  # type: ignore[attr-defined]
        partial = (Partial(), Replicate())
        assert found == {"mean": partial, "sum": partial, "none": (Shard(1), Replicate())}
        assert losses["none"].shape == (6, 3)

    run_threads(4, body)


def test_within_the_context_cross_entropy_is_one_collective() -> None:
    whole = normal(5, 7).requires_grad_()
    target = torch.tensor([0, 6, -100, 3, 2])
    expected = F.cross_entropy(whole, target, label_smoothing=0.1)
    expected.backward()

    def body() -> None:
        mesh = mesh_of((3,))
        # A plain target is this rank's part, which is all of it where the batch is not cut.
        for goal in (target, distribute_tensor(target, mesh, [Replicate()])):
            logits = distribute_tensor(whole.detach(), mesh, [Shard(1)]).detach().requires_grad_()
            with loss_parallel(), CommDebugMode() as comms:
                loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, goal)
            assert comms.get_comm_counts() == {"all_gather_into_tensor": 1}
            with CommDebugMode() as comms:
                loss.backward()
            assert comms.get_total_counts() == 0
            torch.testing.assert_close(loss.full_tensor(), expected.detach())
            torch.testing.assert_close(logits.grad.full_tensor(), whole.grad)

    run_threads(3, body)


def test_without_the_context_nothing_is_gathered_either() -> None:
    whole, target = normal(5, 7), torch.tensor([0, 6, 1, 3, 2])

    def body() -> None:
        mesh = mesh_of((2,))
        logits = distribute_tensor(whole, mesh, [Shard(1)]).detach().requires_grad_()
        goal = distribute_tensor(target, mesh, [Replicate()])
        with CommDebugMode() as comms:
            loss = F.cross_entropy(logits, goal)
            loss.backward()
        assert comms.get_comm_counts() == {"all_reduce": 4}
        assert comms.get_total_bytes() < 8 * 4 * 5
        torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(whole, target))

    run_threads(2, body)


def test_the_context_leaves_other_calls_alone() -> None:
    whole, target = normal(5, 7), torch.tensor([0, 6, 1, 3, 2])

    def body() -> None:
        mesh = mesh_of((2,))
        with loss_parallel():
            assert torch.equal(F.cross_entropy(whole, target), F.cross_entropy(whole, target))
            by_rows = F.cross_entropy(
                distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(target, mesh, [Shard(0)])
            )
            likelihood = F.nll_loss(
                F.log_softmax(distribute_tensor(whole, mesh, [Shard(1)]), 1),
                distribute_tensor(target, mesh, [Replicate()]),
            )
        torch.testing.assert_close(by_rows.full_tensor(), F.cross_entropy(whole, target))  # type: ignore[attr-defined]
        torch.testing.assert_close(likelihood.full_tensor(), F.cross_entropy(whole, target))  # type: ignore[attr-defined]

    run_threads(2, body)


WRONG: dict[str, tuple[list[Placement], dict[str, Any], type[Exception], str]] = {
    "whole": ([Replicate(), Replicate()], {}, LayoutError, "one axis must cut dim 1"),
    "twice": ([Shard(1), Shard(1)], {}, LayoutError, "F.cross_entropy, which takes any layout"),
    "partial": ([Partial(), Shard(1)], {}, LayoutError, "one axis must cut dim 1"),
    "vocabulary": ([Replicate(), Shard(1)], {"vocab_size": 7}, GroupError, "mesh and shape say both"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layouts(name: str) -> None:
    placements, options, kind, text = WRONG[name]

    def body() -> None:
        mesh = mesh_of((2, 2))
        begin = [placement if placement.is_partial() else Replicate() for placement in placements]
        logits = DTensor.from_local(normal(5, 7), mesh, begin).redistribute(placements=placements)
        with pytest.raises(kind, match=text) as caught:
            vocab_parallel_cross_entropy(logits, torch.zeros(5, dtype=torch.int64), **options)
        assert f"rank {disttrain.get_rank()}" in str(caught.value)

    run_threads(4, body)


def test_plain_logits_take_plain_tensors() -> None:
    def body() -> None:
        target = distribute_tensor(torch.zeros(5, dtype=torch.int64), mesh_of((2,)), [Replicate()])
        with pytest.raises(GroupError, match="target or weight a DTensor"):
            vocab_parallel_cross_entropy(normal(5, 4), target, vocab_size=8)

    run_threads(2, body)
