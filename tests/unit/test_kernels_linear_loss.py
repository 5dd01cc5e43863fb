"""Linear layer and cross-entropy in blocks of logits, judged by torch's on the whole, in fp64; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard
from disttrain.errors import DisttrainError, GroupError, LayoutError, ShapeError
from disttrain.kernels import linear_cross_entropy
from disttrain.kernels.cross_entropy.plan import FEWEST_ROWS, plan_blocks
from disttrain.pieces import piece
from disttrain.testing import run_threads
from tests.cases.kernels import IMPLEMENTATIONS, drawn, judge, use_implementation
from tests.cases.shardings import laid_out, mesh_of

NUM_ROWS, DIM, NUM_CLASSES = 7, 5, 11
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignoring": {"ignore_index": 1},
    "smoothed": {"label_smoothing": 0.3},
    "weighted": {"class_weight": drawn(NUM_CLASSES, seed=3).square()},
    "z": {"z_loss": 0.1},
    "capped": {"soft_cap": 2.0},
    "everything": {
        "class_weight": drawn(NUM_CLASSES, seed=3).square(),
        "label_smoothing": 0.2,
        "ignore_index": 0,
        "z_loss": 0.1,
        "soft_cap": 1.5,
    },
}
HIDDEN, WEIGHT, BIAS = drawn(NUM_ROWS, DIM), drawn(NUM_CLASSES, DIM, seed=1), drawn(NUM_CLASSES, seed=2)
TARGET = torch.tensor([0, 3, 10, 1, 1, 0, 7])
ELEMENTS = [10**6, 3 * NUM_CLASSES, 13]
"""Of a block: one for all, some for the rows, and some for the classes too."""


def expected(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    class_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    soft_cap: float = 0.0,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    if soft_cap:
        logits = soft_cap * (logits / soft_cap).tanh()
    options: dict[str, Any] = {"weight": class_weight, "ignore_index": ignore_index}
    losses = F.cross_entropy(logits, TARGET, reduction="none", label_smoothing=label_smoothing, **options)
    weights = (ignore_index != TARGET).to(logits.dtype)
    if class_weight is not None:
        weights = weights * class_weight.to(logits.dtype)[TARGET]
    losses = losses + z_loss * logits.logsumexp(1).square() * weights
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that classes are cut before rows are single."""
    monkeypatch.setattr("disttrain.kernels.cross_entropy.plan.FEWEST_ROWS", 2)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients(name: str, reduction: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_implementation(implementation, monkeypatch)
    dtype = torch.float64 if implementation == "reference" else torch.float32
    options = {**OPTIONS[name], "reduction": reduction}
    for num_elements in ELEMENTS:
        for inputs in ([HIDDEN, WEIGHT], [HIDDEN, WEIGHT, BIAS]):
            judge(
                lambda hidden, weight, *bias, size=num_elements * dtype.itemsize: linear_cross_entropy(
                    hidden, weight, TARGET, *bias, block_bytes=size, **options
                ),
                partial(expected, **options),
                inputs,
                dtype,
            )


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_up_in_fp32(dtype: torch.dtype) -> None:
    hidden, weight = (tensor.to(dtype).requires_grad_() for tensor in (HIDDEN, WEIGHT))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    wished = expected(*exact)
    wished.backward()
    for num_elements in ELEMENTS:
        loss = linear_cross_entropy(hidden, weight, TARGET, block_bytes=2 * num_elements)
        assert loss.dtype is torch.float32
        torch.testing.assert_close(loss.double(), wished, rtol=1e-2, atol=1e-2)
        for found, one in zip(torch.autograd.grad(loss, [hidden, weight]), exact, strict=True):
            assert found.dtype is dtype
            torch.testing.assert_close(found.double(), one.grad, rtol=2e-2, atol=1e-2)


@given(
    num_rows=st.integers(1, 20_000),
    num_columns=st.integers(1, 10_000),
    element_bytes=st.sampled_from([2, 4, 8]),
    block_bytes=st.integers(1, 1 << 26),
)
def test_blocks_fit_and_cover(num_rows: int, num_columns: int, element_bytes: int, block_bytes: int) -> None:
    blocks = plan_blocks(num_rows, num_columns, element_bytes, block_bytes)
    rows, columns = list(blocks.of_rows()), list(blocks.of_columns(num_columns))
    assert rows[0].start == columns[0].start == 0
    assert rows[-1].stop >= num_rows > rows[-1].start
    assert columns[-1].stop == num_columns
    assert sum(part.stop - part.start for part in columns) == num_columns
    least = min(num_rows, FEWEST_ROWS) * element_bytes
    assert blocks.rows * blocks.columns * element_bytes <= max(block_bytes, least)
    if blocks.cuts_columns:
        assert blocks.rows == min(num_rows, FEWEST_ROWS)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_classes_cut_among_ranks(num_ranks: int, reduction: str) -> None:
    options = {**OPTIONS["everything"], "reduction": reduction}
    leaves = [tensor.clone().requires_grad_() for tensor in (HIDDEN, WEIGHT, BIAS)]
    wished = expected(*leaves, **options)
    (wished * drawn(*wished.shape, seed=5)).sum().backward()

    def body() -> None:
        group = disttrain.init_device_mesh("cpu", (num_ranks,))
        size, first = piece(NUM_CLASSES, num_ranks, disttrain.get_rank())
        for num_elements in ELEMENTS:
            hidden = HIDDEN.clone().requires_grad_()
            weight, bias = (whole.narrow(0, first, size).detach().requires_grad_() for whole in (WEIGHT, BIAS))
            loss = linear_cross_entropy(
                hidden, weight, TARGET, bias, group, vocab_size=NUM_CLASSES, block_bytes=8 * num_elements, **options
            )
            torch.testing.assert_close(loss, wished.detach())
            (loss * drawn(*wished.shape, seed=5)).sum().backward()
            for own, leaf in zip((hidden.grad, weight.grad, bias.grad), leaves, strict=True):
                assert leaf.grad is not None
                torch.testing.assert_close(own, leaf.grad if own is hidden.grad else leaf.grad.narrow(0, first, size))

    run_threads(num_ranks, body)


def test_a_rank_without_classes() -> None:
    target = torch.tensor([0, 3, 4, 1, 1, 0, 2])
    leaves = [HIDDEN.clone().requires_grad_(), WEIGHT[:5].clone().requires_grad_()]
    wished = F.cross_entropy(F.linear(*leaves), target)
    wished.backward()

    def body() -> None:
        group = disttrain.init_device_mesh("cpu", (4,))
        size, first = piece(5, 4, disttrain.get_rank())
        hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT[:5].narrow(0, first, size).clone().requires_grad_()
        loss = linear_cross_entropy(hidden, weight, target, group=group, vocab_size=5)
        loss.backward()
        torch.testing.assert_close(loss, wished.detach())
        torch.testing.assert_close(hidden.grad, leaves[0].grad)
        assert leaves[1].grad is not None
        torch.testing.assert_close(weight.grad, leaves[1].grad.narrow(0, first, size))

    run_threads(4, body)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dtensors(reduction: str) -> None:
    """On a mesh whose first axis cuts the batch and whose second the classes, or not."""
    options = {**OPTIONS["everything"], "reduction": reduction}
    leaves = [tensor.clone().requires_grad_() for tensor in (HIDDEN, WEIGHT, BIAS)]
    wished = expected(*leaves, **options)
    (wished * drawn(*wished.shape, seed=5)).sum().backward()

    def body() -> None:
        mesh = mesh_of((2, 2))
        for of_hidden in ([Shard(0), Replicate()], [Shard(0), Shard(0)], [Replicate(), Replicate()]):
            for of_weight in ([Replicate(), Shard(0)], [Replicate(), Replicate()]):
                hidden = laid_out(HIDDEN, mesh, of_hidden).requires_grad_()
                weight, bias = (laid_out(whole, mesh, of_weight).requires_grad_() for whole in (WEIGHT, BIAS))
                target = laid_out(TARGET, mesh, [Replicate(), Replicate()])
                loss = linear_cross_entropy(hidden, weight, target, bias, **options)
                assert isinstance(loss, DTensor)
                torch.testing.assert_close(loss.full_tensor(), wished.detach())
                weights = laid_out(drawn(*wished.shape, seed=5), mesh, [Replicate(), Replicate()])
                (loss * weights).sum().backward()
                for own, leaf in zip((hidden, weight, bias), leaves, strict=True):
                    torch.testing.assert_close(own.grad.full_tensor(), leaf.grad)
        with pytest.raises(LayoutError, match="at most one axis may cut it"):
            linear_cross_entropy(hidden, laid_out(WEIGHT, mesh, [Shard(0), Shard(0)]), target)

    run_threads(4, body)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_graph_holds_it_unbroken(reduction: str) -> None:
    def run(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden.sin(), weight * 2, TARGET, soft_cap=2.0, reduction=reduction).square().sum()

    leaves = [HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()]
    compiled: Callable[..., torch.Tensor] = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(run(*leaves), leaves)
    )


def test_within_autocast() -> None:
    hidden, weight = (tensor.float().requires_grad_() for tensor in (HIDDEN, WEIGHT))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, TARGET)
    assert loss.dtype is torch.float32
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype is torch.float32
    torch.testing.assert_close(loss.detach().double(), expected(HIDDEN, WEIGHT), rtol=1e-2, atol=1e-2)


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a gradient was begun")

    monkeypatch.setattr("disttrain.kernels.cross_entropy.graph.Sums", refuse)
    weight = WEIGHT.clone().requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(HIDDEN, weight, TARGET), expected(HIDDEN, WEIGHT))


def test_nothing_and_nobody() -> None:
    weight = WEIGHT.clone().requires_grad_()
    loss = linear_cross_entropy(HIDDEN[:0], weight, TARGET[:0], reduction="sum")
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0
    assert linear_cross_entropy(HIDDEN, WEIGHT, torch.full_like(TARGET, -100)).isnan()


def test_backward_may_come_twice_but_not_of_itself() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, WEIGHT, TARGET)
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    assert torch.equal(first, second)
    with pytest.raises(NotImplementedError, match="not differentiable twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_of_no_tokens_a_mean_is_nan_and_its_gradients_are_zeros(num_rows: int) -> None:
    target = torch.full((num_rows,), -100)
    for run in (
        lambda hidden, weight: linear_cross_entropy(hidden, weight, target, block_bytes=200),
        lambda hidden, weight: F.cross_entropy(F.linear(hidden, weight), target),
    ):
        leaves = [HIDDEN[:num_rows].clone().requires_grad_(), WEIGHT.clone().requires_grad_()]
        loss = run(*leaves)
        loss.backward()
        assert loss.isnan()
        for leaf in leaves:
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_autocast_leaves_fp64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(HIDDEN, WEIGHT, TARGET)
        torch.testing.assert_close(loss, F.cross_entropy(F.linear(HIDDEN, WEIGHT), TARGET))


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"weight \(11, 4\)\. Give a weight \(4, 5\)|Give a weight \(11, 5\)"):
        linear_cross_entropy(HIDDEN, WEIGHT[:, :4], TARGET)
    with pytest.raises(ShapeError, match=r"dtypes are torch.float32, torch.float64"):
        linear_cross_entropy(HIDDEN.float(), WEIGHT, TARGET)
    with pytest.raises(ShapeError, match="no reduction 'max'"):
        linear_cross_entropy(HIDDEN, WEIGHT, TARGET, reduction="max")
    with pytest.raises(ShapeError, match="soft_cap is -1"):
        linear_cross_entropy(HIDDEN, WEIGHT, TARGET, soft_cap=-1.0)
    with pytest.raises(ShapeError, match=r"target is torch.float64"):
        linear_cross_entropy(HIDDEN, WEIGHT, HIDDEN[:, 0])
    with pytest.raises(GroupError, match="Give both or none"):
        linear_cross_entropy(HIDDEN, WEIGHT, TARGET, vocab_size=3)
    with pytest.raises(IndexError, match="there are 11 classes"):
        linear_cross_entropy(HIDDEN, WEIGHT, TARGET + 1)


def test_a_rank_that_is_refused_keeps_nobody_waiting() -> None:
    def body() -> None:
        group = disttrain.init_device_mesh("cpu", (2,))
        size, first = piece(NUM_CLASSES, 2, disttrain.get_rank())
        weight = WEIGHT.narrow(0, first, size)
        wrong = weight[:-1] if disttrain.get_rank() == 0 else weight
        with pytest.raises(ShapeError if disttrain.get_rank() == 0 else DisttrainError):
            linear_cross_entropy(HIDDEN, wrong, TARGET, group=group, vocab_size=NUM_CLASSES)

    run_threads(2, body)
