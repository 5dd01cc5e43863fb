"""How results of attention and their gradients are laid in memory."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from disttrain.kernels.attention.layouts import laid_as, with_laid_gradient

SHAPE = (2, 4, 6, 8)
"""Of heads: (B, H, L, E)."""


def by_positions(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def by_sequence(tensor: torch.Tensor) -> torch.Tensor:
    """As models with the sequence first have it."""
    return tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def drawn(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def test_what_lies_as_it_should_is_not_copied() -> None:
    for query in (drawn(), by_positions(drawn()), by_sequence(drawn())):
        (same,) = laid_as(query, query)
        assert same.data_ptr() == query.data_ptr()
        assert same.stride() == query.stride()


def test_results_lie_as_the_query_without_gaps() -> None:
    wide = torch.cat([drawn(), drawn(1)], 2)
    for query in (drawn(), by_positions(drawn()), by_positions(wide)[:, :, 6:], by_sequence(drawn())):
        for out in (drawn(2), by_positions(drawn(2)), wide[:, :, 6:], drawn(2).flip(0)):
            (laid,) = laid_as(query, out)
            assert torch.equal(laid, out)
            assert laid.stride() == torch.empty_like(query).stride()


def test_wider_values_lie_in_the_same_order() -> None:
    (laid,) = laid_as(by_positions(drawn()), torch.zeros(2, 4, 6, 16))
    assert laid.stride() == (6 * 4 * 16, 16, 4 * 16, 1)


class Seen(torch.autograd.Function):
    """Notes how gradients lie that reach it."""

    strides: ClassVar[list[tuple[int, ...]]] = []

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        Seen.strides.append(grad.stride())
        return grad


@pytest.mark.parametrize("is_by_positions", [False, True])
def test_a_gradient_lies_as_its_result(is_by_positions: bool) -> None:
    tensor = (by_positions(drawn()) if is_by_positions else drawn()).requires_grad_()
    for grad in (drawn(1), by_positions(drawn(1)), drawn(1)[:, :1].expand(SHAPE)):
        Seen.strides.clear()
        result = with_laid_gradient(Seen.apply(tensor))
        assert result.stride() == tensor.stride()
        (found,) = torch.autograd.grad(result, tensor, grad)
        assert torch.equal(found, grad)
        assert Seen.strides == [tensor.stride()]


def test_transforms_take_it() -> None:
    def loss(tensor: torch.Tensor) -> torch.Tensor:
        result = with_laid_gradient(tensor * 2)
        return (result.transpose(1, 2).flatten(2) ** 2).sum()

    tensor = drawn()
    assert torch.equal(torch.func.grad(loss)(tensor), 8 * tensor)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo, which makes an object of the function
def test_graphs_hold_it_for_lengths_that_are_symbols() -> None:
    def loss(tensor: torch.Tensor) -> torch.Tensor:
        result = with_laid_gradient(tensor * 2)
        return (result.transpose(1, 2).flatten(2) ** 2).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (6, 10, 15):
        for lay in (torch.Tensor.contiguous, by_positions, by_sequence):
            leaf = lay(torch.randn(2, 4, length, 8)).requires_grad_()
            compiled(leaf).backward()
            torch.testing.assert_close(leaf.grad, 8 * leaf.detach())


def test_nothing_is_added_where_no_gradient_comes() -> None:
    result = drawn()
    assert with_laid_gradient(result) is result
