"""What was queued for a graph whose recording has failed is not there: nothing of it is used, nor waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.fsdp2.state import state_of
from disttrain.fsdp2.transfers.streams import CommStreams
from disttrain.testing import run_threads

POINTS = ["forward", "backward", "end"]


class Fails(torch.autograd.Function):
    """Raises in its forward or its backward, where it is told to."""

    at = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Fails.at == "forward":
            raise ValueError("the user's")
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fails.at == "backward":
            raise ValueError("the user's")
        return grad


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Fails.apply(super().forward(x))


def sharded(reshards: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), *(Layer(3, 3) for _ in range(3)), nn.Linear(3, 3))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshards, mp_policy=policy)
    fully_shard(model, reshard_after_forward=reshards, mp_policy=policy)
    model.set_reshard_after_backward(reshards)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, writes: bool = True) -> torch.Tensor:
    rank = disttrain.get_rank()
    loss = model(torch.arange(6.0).view(2, 3) + rank).square().sum()
    loss.backward()
    if writes:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def fail(model: nn.Module, optimizer: torch.optim.Optimizer, point: str) -> None:
    """As where a recording fails: nothing has been computed."""
    Fails.at = point
    try:
        step(model, optimizer, writes=False)
    except ValueError:
        pass
    finally:
        Fails.at = ""
    for module in model.modules():
        state = state_of(module)
        for group in () if state is None else state.groups:
            if group._unsharded is not None and group._unsharded._storage.nbytes():
                for place in group._unsharded.places:
                    place.fill_(torch.nan)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("reshards", [True, False])
def test_the_step_after_it_is_as_without_it(point: str, reshards: bool) -> None:
    def main() -> None:
        losses = []
        for fails in (False, True):
            model = sharded(reshards)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            taken = [step(model, optimizer) for _ in range(2)]
            grads = [parameter.grad for parameter in model.parameters()]
            if fails:
                fail(model, optimizer, point)
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.grad = grad
                for module in model.modules():
                    getattr(module, "forget_recording", lambda: None)()
                assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            losses.append([*taken, *(step(model, optimizer) for _ in range(3))])
        assert torch.stack(losses[0]).isfinite().all()
        assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))

    run_threads(1, main)


def test_no_event_of_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to wait for events that a graph has recorded."""

    def main() -> None:
        model = sharded(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step(model, optimizer)
        fail(model, optimizer, "backward")
        state = state_of(model)
        assert state is not None
        assert state.context is not None
        comm = state.context.comm
        assert comm.reducing
        with monkeypatch.context() as patch:
            patch.setattr(CommStreams, "follow", lambda *_: pytest.fail("an event was waited for"))
            for module in model.modules():
                getattr(module, "forget_recording", lambda: None)()
        assert not comm.reducing

    run_threads(1, main)
