"""Gathered parameters are freed: what is written to them in a forward is refused, and arrays of them stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import disttrain
from disttrain.errors import ShardingError
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.testing import run_threads


class Writes(nn.Module):
    """Computes x @ weight, and writes to it before."""

    def __init__(self, write: Callable[[nn.Parameter], None] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.write is not None:
            self.write(self.weight)
        return x @ self.weight


def clamp(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(max=5.0)


def clamp_a_view(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[1:].mul_(2)


def replace(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(max=5.0)


@pytest.mark.parametrize("write", [clamp, clamp_a_view, replace])
@pytest.mark.parametrize("mode", ["trained", "not trained", "below a root"])
def test_a_write_in_a_forward_is_refused_and_nothing_of_it_stays(write: Callable, mode: str) -> None:
    def body() -> None:
        inner = fully_shard(Writes(write))
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), inner)) if mode == "below a root" else inner
        with (
            torch.set_grad_enabled(mode != "not trained"),
            pytest.raises(ShardingError, match="weight of this FSDPWrites"),
        ):
            model(torch.ones(2, 4))
        inner.write = None
        torch.testing.assert_close(inner(torch.ones(1, 4)), torch.arange(12.0).reshape(4, 3).sum(0, keepdim=True))
        model(torch.ones(2, 4)).sum().backward()
        grad = inner.weight.grad.full_tensor()
        torch.testing.assert_close(grad, grad[:, :1].expand(4, 3))

    run_threads(2, body)


def clamp_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(max=5.0)


def write_to_an_array(weight: nn.Parameter) -> None:
    weight.detach().numpy()[3, 2] = 0


def flip_the_rows(weight: nn.Parameter) -> None:
    weight.data.copy_(weight.data.flip(0))


@pytest.mark.parametrize("write", [clamp_data, write_to_an_array, flip_the_rows])
@pytest.mark.parametrize("mode", ["trained", "not trained", "below a root", "in fewer bits", "large"])
def test_writes_without_a_trace_are_found(write: Callable, mode: str) -> None:
    policy = MixedPrecisionPolicy(
        torch.bfloat16 if mode == "in fewer bits" and write is not write_to_an_array else None
    )

    def body() -> None:
        inner = Writes(None)
        if mode == "large":
            inner.weight = nn.Parameter(torch.arange(8000.0).reshape(4, -1))
        inner.weight.data[0] = float("nan")
        values = inner.weight[1:].tolist()
        fully_shard(inner, mp_policy=policy)
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), inner)) if mode == "below a root" else inner
        model(torch.ones(2, 4))
        inner.write = write
        with (
            torch.set_grad_enabled(mode != "not trained"),
            pytest.raises(ShardingError, match="weight of this FSDPWrites"),
        ):
            model(torch.ones(2, 4))
        inner.write = None
        assert inner.weight.full_tensor()[1:].tolist() == values
        inner(torch.ones(2, 4))

    run_threads(2, body)


@pytest.mark.parametrize("write", [clamp, clamp_a_view, replace])
@pytest.mark.parametrize("is_freed_by", ["reshard", "a forward"])
def test_a_write_after_unshard_is_refused(write: Callable, is_freed_by: str) -> None:
    def body() -> None:
        model = fully_shard(Writes(None))
        for _ in range(2):
            model.unshard()
            assert model.weight.shape == (4, 3)
            model.reshard()
            model.unshard(async_op=True).wait()
            write(model.weight)
            with pytest.raises(ShardingError, match=r"weight has been written to after unshard\(\)"):
                model.reshard() if is_freed_by == "reshard" else model(torch.ones(2, 4))
            torch.testing.assert_close(model.weight.full_tensor(), torch.arange(12.0).reshape(4, 3))
            model(torch.ones(2, 4)).sum().backward()

    run_threads(2, body)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_kept_after_a_backward_sees_writes_through_data(is_replaced: bool) -> None:
    def body() -> None:
        model = fully_shard(Writes(None))
        model.set_reshard_after_backward(False)
        for step in range(4):
            output = model(torch.ones(1, 4))
            torch.testing.assert_close(output, (torch.arange(12.0).reshape(4, 3) - step).sum(0, keepdim=True))
            output.sum().backward()
            if is_replaced:
                model.weight.data = model.weight.data - 1
            else:
                model.weight.data.sub_(1)

    run_threads(2, body)


def test_what_writes_no_other_values_is_no_obstacle() -> None:
    def body() -> None:
        model = Writes(lambda weight: weight.data.add_(0))
        model.weight.data[0] = float("nan")
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        torch.testing.assert_close(model.weight.full_tensor()[1:], torch.arange(3.0, 12.0).reshape(3, 3) - 3.0)

    run_threads(3, body)


def test_the_norm_of_an_embedding_is_refused() -> None:
    def body() -> None:
        embedding = fully_shard(nn.Embedding(6, 4, max_norm=0.1))
        with pytest.raises(ShardingError, match="max_norm"):
            embedding(torch.tensor([0, 5]))

    run_threads(2, body)


def test_arrays_of_gathered_parameters_are_no_obstacle() -> None:
    def body() -> None:
        seen = []
        model = fully_shard(Writes(lambda weight: seen.append(weight.detach().numpy())))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad.full_tensor().tolist() == [[6.0] * 3] * 4
        assert seen[0].tolist() == torch.arange(12.0).reshape(4, 3).tolist()

    run_threads(2, body)


def test_sparse_gradients_are_reduced_as_dense_ones() -> None:
    def body() -> None:
        plain = nn.Embedding(5, 3, sparse=True)
        plain.weight.data = torch.arange(15.0).reshape(5, 3)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
        model[0].weight.data = plain.weight.data.clone()
        fully_shard(model)
        rank = disttrain.get_rank()
        for syncs in (False, True):
            model.set_requires_gradient_sync(syncs)
            model(torch.tensor([rank, 3])).square().sum().backward()
        for other in (0, 1, 0, 1):
            (plain(torch.tensor([other, 3])).square().sum() / 2).backward()
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain.weight.grad.to_dense())

    run_threads(2, body)
