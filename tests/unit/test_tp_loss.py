"""Vocabulary-parallel cross-entropy, judged by F.cross_entropy of the whole in one process; ranks are threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttrain
from disttrain.dtensor import CommDebugMode
from disttrain.errors import DisttrainError, GroupError, ShapeError
from disttrain.kernels.cross_entropy import pieces as cross_entropy_pieces
from disttrain.pieces import piece
from disttrain.testing import run_threads
from disttrain.tp.loss.vocab_parallel import vocab_parallel_cross_entropy
from tests.cases.shardings import normal

CUTS = ((1, 7), (2, 7), (3, 7), (3, 2), (4, 5))
"""Ranks and classes: uneven parts, and empty ones."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignoring": {"ignore_index": 1},
    "smoothed": {"label_smoothing": 0.3},
    "wholly smoothed": {"label_smoothing": 1.0},
    "weighted": {"weighted": True},
    "everything": {"weighted": True, "label_smoothing": 0.2, "ignore_index": 0},
}


def targets(num_rows: int, num_classes: int, *shape: int) -> torch.Tensor:
    drawn = torch.randint(0, num_classes, (num_rows, *shape), generator=torch.Generator().manual_seed(num_rows))
    return drawn.masked_fill(drawn == num_classes - 1, 0) if num_classes > 2 else drawn


def part(whole: torch.Tensor, num_classes: int) -> torch.Tensor:
    """This rank's, along the last dim; it shares the whole's memory, and so has gaps between rows."""
    size, first = piece(num_classes, disttrain.get_world_size(), disttrain.get_rank())
    return whole.narrow(-1, first, size)


def compare(
    num_ranks: int,
    logits: torch.Tensor,
    target: torch.Tensor,
    expected_of: Callable[[torch.Tensor], torch.Tensor],
    **options: Any,
) -> None:
    """Values and gradients of the parts are those that `expected_of` gives for the whole."""
    num_classes = logits.shape[-1]
    whole = logits.clone().requires_grad_()
    expected = expected_of(whole)
    weights = normal(*expected.shape, seed=9)
    (expected * weights).sum().backward()

    def body() -> None:
        own = part(logits, num_classes).detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(own, target, vocab_size=num_classes, **options)
        torch.testing.assert_close(loss, expected.detach())
        (loss * weights).sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(own.grad, part(whole.grad, num_classes))

    run_threads(num_ranks, body)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_classes(name: str, reduction: str) -> None:
    for num_ranks, num_classes in CUTS:
        options = {**OPTIONS[name], "reduction": reduction}
        if options.pop("weighted", False):
            options["weight"] = normal(num_classes, seed=3).square()
        target = targets(5, num_classes)
        logits = normal(5, num_classes)
        compare(num_ranks, logits, target, functools.partial(F.cross_entropy, target=target, **options), **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_probabilities(is_whole: bool, reduction: str) -> None:
    for num_ranks, num_classes in CUTS:
        wanted = normal(4, num_classes, seed=1).softmax(1)
        for weight, smoothing in ((None, 0.0), (normal(num_classes, seed=3).square(), 0.3)):
            options: dict[str, Any] = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
            logits = normal(4, num_classes)
            whole = logits.clone().requires_grad_()
            expected = F.cross_entropy(whole, wanted, **options)
            expected.sum().backward()

            def body(
                logits: torch.Tensor = logits,
                wanted: torch.Tensor = wanted,
                options: dict[str, Any] = options,
                expected: torch.Tensor = expected,
                grad: Any = whole.grad,
                num_classes: int = num_classes,
            ) -> None:
                own = part(logits, num_classes).detach().requires_grad_()
                target = wanted if is_whole else part(wanted, num_classes)
                loss = vocab_parallel_cross_entropy(own, target, vocab_size=num_classes, **options)
                torch.testing.assert_close(loss, expected.detach())
                loss.sum().backward()
                torch.testing.assert_close(own.grad, part(grad, num_classes))

            run_threads(num_ranks, body)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_z_loss(reduction: str) -> None:
    target, weight = targets(5, 7), normal(7, seed=3).square()

    def by_formula(logits: torch.Tensor) -> torch.Tensor:
        counted = weight[target] * (target != 0)
        losses = F.cross_entropy(logits, target, weight, ignore_index=0, reduction="none")
        losses = losses + 0.1 * logits.logsumexp(1).square() * counted
        if reduction == "none":
            return losses
        return losses.sum() / (counted.sum() if reduction == "mean" else 1)

    compare(3, normal(5, 7), target, by_formula, weight=weight, ignore_index=0, reduction=reduction, z_loss=0.1)
    wanted = normal(5, 7, seed=1).softmax(1)

    def of_probabilities(logits: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(logits, wanted, reduction="none") + 0.1 * logits.logsumexp(1).square()
        return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()

    compare(3, normal(5, 7), wanted, of_probabilities, reduction=reduction, z_loss=0.1)


def test_batches_of_any_shape() -> None:
    single, many = torch.tensor(4), targets(2, 7, 3)
    compare(2, normal(7), single, lambda whole: F.cross_entropy(whole, single))
    compare(2, normal(2, 3, 7), many, lambda whole: F.cross_entropy(whole.flatten(0, 1), many.flatten()))
    none = many[:0]
    compare(
        2,
        normal(0, 3, 7),
        none,
        lambda whole: F.cross_entropy(whole.flatten(0, 1), none.flatten(), reduction="sum"),
        reduction="sum",
    )
    turned = normal(7, 5).t()
    target = targets(5, 7)
    compare(3, turned, target, lambda whole: F.cross_entropy(whole, target))
    compare(3, turned, target.int(), lambda whole: F.cross_entropy(whole, target))


def test_infinite_logits_and_ignored_rows() -> None:
    masked = normal(3, 7)
    masked[0, 2:] = float("-inf")
    target = torch.tensor([1, -100, 3])
    compare(3, masked, target, lambda whole: F.cross_entropy(whole, target))
    masked[1] = float("-inf")
    compare(3, masked[[0, 2]], target[[0, 2]], lambda whole: F.cross_entropy(whole, target[[0, 2]]))

    def all_ignored() -> None:
        own = part(normal(3, 7), 7).detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(own, torch.full((3,), -100), vocab_size=7, label_smoothing=0.1, z_loss=0.1)
        assert loss.isnan()
        loss.backward()
        assert own.grad is not None
        assert own.grad.count_nonzero() == 0

    run_threads(2, all_ignored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_statistics_of_fp32(dtype: torch.dtype) -> None:
    logits, target = normal(5, 7).to(dtype), targets(5, 7)
    wanted = normal(5, 7, seed=1).softmax(1).to(dtype)
    for goal, weight, smoothing in ((target, None, 0.1), (wanted, None, 0.1), (target, normal(7).square(), 0.0)):
        wide = logits.float().requires_grad_()
        wide_goal = goal.float() if goal.is_floating_point() else goal
        wide_weight = None if weight is None else weight.float()
        expected = F.cross_entropy(wide, wide_goal, wide_weight, label_smoothing=smoothing)
        expected.backward()

        def body(
            goal: torch.Tensor = goal,
            weight: Any = weight,
            s: float = smoothing,
            expected: Any = expected,
            grad: Any = wide.grad,
        ) -> None:
            own = part(logits, 7).detach().requires_grad_()
            loss = vocab_parallel_cross_entropy(own, goal, vocab_size=7, weight=weight, label_smoothing=s)
            assert loss.dtype == torch.float32
            torch.testing.assert_close(loss, expected.detach())
            loss.backward()
            assert own.grad is not None
            torch.testing.assert_close(own.grad, part(grad, 7).to(dtype))

        run_threads(3, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pieces_are_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    logits, target = normal(7, 6).to(dtype), targets(7, 6)
    wanted = normal(7, 6, seed=1).softmax(1)

    def body() -> list[torch.Tensor]:
        results = []
        for goal in (target, wanted):
            own = part(logits, 6).detach().requires_grad_()
            options: dict[str, Any] = {"weight": normal(6).square(), "label_smoothing": 0.1, "z_loss": 0.1}
            loss = vocab_parallel_cross_entropy(own, goal, vocab_size=6, **options)
            loss.backward()
            assert own.grad is not None
            results += [loss.detach(), own.grad]
        return results

    expected = run_threads(2, body)
    for num_elements in (1, 7):
        monkeypatch.setattr(cross_entropy_pieces, "PIECE_ELEMENTS", num_elements)
        for found, wished in zip(run_threads(2, body), expected, strict=True):
            torch.testing.assert_close(found, wished)


@pytest.mark.parametrize(("smoothing", "num_numbers"), [(0.0, 2), (0.1, 3)])
def test_one_collective_of_few_numbers_and_none_in_backward(smoothing: float, num_numbers: int) -> None:
    def body() -> None:
        own = part(normal(6, 8).bfloat16(), 8).detach().requires_grad_()
        with CommDebugMode() as comms:
            loss = vocab_parallel_cross_entropy(own, targets(6, 8), vocab_size=8, label_smoothing=smoothing)
        assert comms.get_comm_counts() == {"all_gather_into_tensor": 1}
        assert comms.get_total_bytes() == num_numbers * 6 * 4
        with CommDebugMode() as comms:
            loss.backward()
        assert comms.get_total_counts() == 0

    run_threads(2, body)


def test_logits_are_kept_as_they_are() -> None:
    def body() -> None:
        logits = normal(6, 4).bfloat16().requires_grad_()
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            vocab_parallel_cross_entropy(logits, targets(6, 8), vocab_size=8)
        large = [tensor for tensor in kept if tensor.numel() > 6]
        assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]

    run_threads(2, body)


def test_twice_differentiated_is_refused() -> None:
    def body() -> None:
        own = part(normal(3, 6), 6).detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(own, targets(3, 6), vocab_size=6)
        (grad,) = torch.autograd.grad(loss, own, create_graph=True)
        with pytest.raises(NotImplementedError, match="not differentiable"):
            grad.sum().backward()

    run_threads(2, body)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "target beyond": ({"target": torch.tensor([0, 6, 1])}, IndexError, "out of bounds: there are 6 classes"),
    "target below": ({"target": torch.tensor([0, -1, 1])}, IndexError, "out of bounds"),
    "kind of target": ({"target": torch.ones(3, dtype=torch.bool)}, ShapeError, "Give int64 for classes"),
    "shape of target": ({"target": torch.tensor([0, 1])}, ShapeError, r"of shape \(3,\)"),
    "shape of probabilities": ({"target": torch.ones(3, 5)}, ShapeError, r"of shape \(3, 3\) or \(3, 6\)"),
    "gradient of target": ({"target": torch.ones(3, 6).requires_grad_()}, ShapeError, "target.detach"),
    "ignored probabilities": ({"target": torch.ones(3, 6), "ignore_index": 2}, ShapeError, "ignore_index=2"),
    "weight": ({"weight": torch.ones(3)}, ShapeError, "weights of all 6 classes"),
    "reduction": ({"reduction": "most"}, ShapeError, "mean, sum, none"),
    "smoothing": ({"label_smoothing": 1.5}, ShapeError, "from 0 to 1"),
    "z-loss": ({"z_loss": -1.0}, ShapeError, "positive"),
    "vocabulary": ({"vocab_size": 9}, ShapeError, "this rank's part of 9 is"),
    "no vocabulary": ({"vocab_size": None}, ShapeError, "Give the number of classes of all parts together"),
    "logits": ({"logits": torch.ones(3, 3, dtype=torch.int64)}, ShapeError, "Give floats"),
    "group": ({"group": disttrain.process_group.NON_GROUP_MEMBER}, GroupError, "not a member"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, kind, text = WRONG[name]

    def body() -> None:
        given = {"logits": part(normal(3, 6), 6), "target": torch.tensor([0, 1, 5]), "vocab_size": 6, **changes}
        with pytest.raises(kind, match=text) as caught:
            vocab_parallel_cross_entropy(**given)
        if isinstance(caught.value, DisttrainError):
            assert f"rank {disttrain.get_rank()}" in str(caught.value)

    run_threads(2, body)
