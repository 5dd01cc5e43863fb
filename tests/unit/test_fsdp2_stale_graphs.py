"""Between a forward and its backward, parameters are as they are: what would be gradients of nothing is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads


def sharded(reshard: bool | int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))).double()
    for layer in model[1:]:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 3, dtype=torch.float64)).square().sum()


def step(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.1
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()}, assign=True)


def locally(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.to_local().detach().mul_(0.9)


@pytest.mark.parametrize("write", [step, load, assign, locally])
def test_a_backward_with_other_parameters_is_refused(write: Callable[[nn.Module], None]) -> None:
    def main() -> None:
        model = sharded(True)
        loss = loss_of(model)
        write(model)
        with pytest.raises(
            ShardingError, match=r"parameters of FSDPLinear, such as weight, have been written to since"
        ):
            loss.backward()
        model.zero_grad()
        loss_of(model).backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())

    run_threads(2, main)


def test_one_of_two_forwards() -> None:
    def main() -> None:
        model = sharded(True)
        old = loss_of(model)
        step(model)
        model.zero_grad()
        new = loss_of(model)
        with pytest.raises(ShardingError):
            old.backward()
        model.zero_grad()
        new.backward()
        found = [parameter.grad.full_tensor() for parameter in model.parameters()]
        model.zero_grad()
        loss_of(model).backward()
        for grad, parameter in zip(found, model.parameters(), strict=True):
            assert torch.equal(grad, parameter.grad.full_tensor())

    run_threads(2, main)


@pytest.mark.parametrize("reshard", [False, 1, 2])
def test_what_is_kept_from_the_forward_is_as_it_was(reshard: bool | int) -> None:
    def main() -> None:
        model = sharded(reshard)
        loss_of(model).backward()
        wanted = [parameter.grad.full_tensor() for parameter in model.parameters()]
        model.zero_grad()
        loss = loss_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        loss.backward()
        for grad, parameter in zip(wanted, model.parameters(), strict=True):
            assert torch.equal(grad, parameter.grad.full_tensor())

    run_threads(2, main)


class Tempered(nn.Module):
    """Returns a leaf besides: a parameter that is not sharded, or its input."""

    def __init__(self, *, returns_input: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.returns_input = returns_input

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * self.temperature, x if self.returns_input else self.temperature


@pytest.mark.parametrize("returns_input", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_leaves_that_a_forward_returns_are_not_watched_in_later_backwards(world: int, returns_input: bool) -> None:
    def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            output, leaf = model(x)
            loss = (output * (1 + leaf.mean())).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def model_and_input() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        model = Tempered(returns_input=returns_input).double()
        return model, torch.ones(2, 3, dtype=torch.float64, requires_grad=True)

    expected = train(*model_and_input())

    # Made here: threads draw from one generator.
    made = [model_and_input() for _ in range(world)]

    def main() -> None:
        model, x = made[disttrain.get_rank()]
        torch.testing.assert_close(
            train(fully_shard(model, ignored_params={model.temperature}), x), expected, rtol=1e-12, atol=0
        )
        assert not x._backward_hooks
        assert not model.temperature._backward_hooks

    run_threads(world, main)
