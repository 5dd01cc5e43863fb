"""A schedule that was to be recorded as a graph, and has failed in the middle, is as if it had not begun."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.pipelining import PipelineSchedule, PipelineStage, get_schedule_class
from disttrain.pipelining.runtime.messages import Messenger
from disttrain.testing import run_threads
from tests.cases.pipelines import mean_square, rows

DIM = 4
NUM_STAGES = 3


class Counted(torch.autograd.Function):
    """Raises in the forward or backward of a microbatch, where it is told to."""

    fails_at = ("", 0)
    num_calls: dict[str, int]

    @classmethod
    def call(cls, name: str) -> None:
        cls.num_calls[name] = cls.num_calls.get(name, 0) + 1
        if cls.fails_at == (name, cls.num_calls[name]):
            raise ValueError("the user's")

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counted.call("forward")
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Counted.call("backward")
        return grad


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.linear = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Counted.apply(self.linear(torch.tanh(self.shared(x))))
        return y


def made(layers: list[Stage], *, is_sharded: bool) -> tuple[PipelineSchedule, list[nn.Module]]:
    modules = [copy.deepcopy(layer) for layer in layers]
    if is_sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in modules:
            fully_shard(fully_shard(module.linear, mp_policy=policy) and module, mp_policy=policy)
    options: dict[str, Any] = {}
    if not is_sharded:
        for module in modules:
            module.shared = modules[0].shared
        options = {"tied": {"w": "shared.weight"}}
    stages = [PipelineStage(each, index, NUM_STAGES, "cpu", **options) for index, each in enumerate(modules)]
    kind: Any = get_schedule_class("Interleaved1F1B")
    return kind(stages, 4, loss_fn=mean_square), list(modules)


def step(schedule: PipelineSchedule, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    Counted.num_calls = {}
    losses: list[torch.Tensor] = []
    schedule.step(rows(8, DIM).float(), target=rows(8, DIM, seed=2).float(), losses=losses)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach()


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("at", [("forward", 1), ("forward", 7), ("backward", 1), ("backward", 8)])
def test_the_step_after_it_is_as_without_it(at: tuple[str, int], is_sharded: bool) -> None:
    torch.manual_seed(0)
    layers = [Stage() for _ in range(NUM_STAGES)]

    def main() -> None:
        results = []
        for fails in (False, True):
            schedule, modules = made(layers, is_sharded=is_sharded)
            parameters = {id(each): each for module in modules for each in module.parameters()}.values()
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            taken = [step(schedule, optimizer) for _ in range(2)]
            # Gradients that are to be added to.
            taken.append(step(schedule))
            grads = [parameter.grad for parameter in parameters]
            if fails:
                values = [None if grad is None else grad.clone() for grad in grads]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Messenger, "is_recorded", property(lambda _: True))
                    patch.setattr(Counted, "fails_at", at)
                    with pytest.raises(ValueError, match="the user's"):
                        step(schedule)
                running = schedule._running
                assert running is not None
                now = running._executor._now
                assert not any((now.in_flight, now.outbox, now.inbox, now.handed, now.casts, now.due))
                assert not now.batch.args
                assert not now.losses.losses
                assert running._executor._world.action == ""
                # As capture_step puts them back.
                for parameter, grad, value in zip(parameters, grads, values, strict=True):
                    parameter.grad = grad if grad is None else grad.copy_(value)
            results.append([*taken, *(step(schedule, optimizer) for _ in range(2))])
        assert torch.stack(results[0]).isfinite().all()
        assert torch.equal(torch.stack(results[0]), torch.stack(results[1]))

    run_threads(1, main)


def test_a_step_that_is_not_recorded_ends_the_pipeline() -> None:
    torch.manual_seed(0)
    layers = [Stage() for _ in range(NUM_STAGES)]

    def main() -> None:
        schedule, _ = made(layers, is_sharded=False)
        step(schedule)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Counted, "fails_at", ("forward", 2))
            with pytest.raises(ValueError, match="the user's"):
                step(schedule)
        with pytest.raises(Exception, match="an earlier step has failed"):
            step(schedule)

    run_threads(1, main)
