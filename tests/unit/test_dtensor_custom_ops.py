"""Operators of users without a rule: they run on whole tensors, say so, and write where they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, implicit_replication
from disttrain.errors import LayoutError
from disttrain.testing import run_threads
from tests.cases.shardings import laid_out, mesh_of, normal

X = normal(5, 3)
LAYOUTS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())


@torch.library.custom_op("disttrain_tests::running", mutates_args=())
def running(x: torch.Tensor, times: float) -> torch.Tensor:
    return x.cumsum(0) * times


running.register_fake(lambda x, times: torch.empty_like(x))


def _running_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad.flip(0).cumsum(0).flip(0) * ctx.times, None


running.register_autograd(_running_backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "times", inputs[1]))


@torch.library.custom_op("disttrain_tests::shapeless", mutates_args=())
def shapeless(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    if x.shape != y.shape:
        raise ValueError(f"{tuple(x.shape)} is not {tuple(y.shape)}")
    return [x.sort(0).values, y[y > 0]]


@torch.library.custom_op("disttrain_tests::numbered", mutates_args=("x",))
def numbered(x: torch.Tensor) -> None:
    x.add_(torch.arange(len(x)).view(-1, 1))


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_they_are_right(num_ranks: int) -> None:
    def body() -> None:
        mesh = mesh_of((num_ranks,))
        for placement in LAYOUTS:
            x = laid_out(X, mesh, [placement]).requires_grad_()
            y = running(x, 2.0)
            assert isinstance(y, DTensor)
            torch.testing.assert_close(y.full_tensor(), X.cumsum(0) * 2)
            y.square().sum().backward()
            plain = X.clone().requires_grad_()
            running(plain, 2.0).square().sum().backward()
            assert isinstance(x.grad, DTensor)
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
            # Of this one nobody can tell what comes out before it has run.
            for found, wanted in zip(shapeless(x.detach(), x.detach()), shapeless(X, X), strict=True):
                torch.testing.assert_close(found.full_tensor(), wanted)
            with pytest.raises(ValueError, match=r"\(5, 3\) is not \(3,\)"):
                shapeless(x.detach(), x.detach()[0])
            written = laid_out(X, mesh, [placement])
            numbered(written)
            assert written.placements == (placement,)
            torch.testing.assert_close(written.full_tensor(), X + torch.arange(5).view(-1, 1))

    run_threads(num_ranks, body)


def test_they_say_that_they_gather_or_are_refused() -> None:
    def body() -> None:
        x = laid_out(X, mesh_of((1,)), [Shard(0)])
        with (
            implicit_replication(False),
            pytest.raises(LayoutError, match=r"disttrain_tests\.running: it has no sharding rule"),
        ):
            running(x, 1.0)
        with pytest.warns(
            UserWarning, match=r"disttrain_tests\.running has no sharding rule; its operands are gathered"
        ):
            running(x, 1.0)

    run_threads(1, body)
