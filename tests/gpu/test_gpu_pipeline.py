"""Pipelines on GPUs, by NCCL and by copy engines: the gradients of a single process."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.errors import DisttrainError
from disttrain.pipelining import Costs, PipelineSchedule, PipelineStage, get_schedule_class, make_schedule, simulate
from disttrain.process_group.peers.channels import open_channels
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS
from tests.surroundings.launching import EXAMPLES, launched

pytestmark = pytest.mark.skipif(NUM_GPU_RANKS < 2, reason="needs two GPUs")

DIM = 256


def make_model(num_stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(num_stages))
    return nn.Sequential(*layers).double().cuda()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def make_pipeline(
    name: str, stages_per_rank: int, num_microbatches: int, model: nn.Sequential, copy_engines: bool
) -> PipelineSchedule:
    size = disttrain.get_world_size()
    placement = make_schedule(name, size, num_microbatches, stages_per_rank).placement
    stages = [
        PipelineStage(copy.deepcopy(model[index]), index, len(model), "cuda")
        for index in placement.stages[disttrain.get_rank()]
    ]
    return get_schedule_class(name)(stages, num_microbatches, loss_fn=loss_of, copy_engines=copy_engines)


@on_ranks(2, timeout_s=110)
@pytest.mark.parametrize("copy_engines", [True, False])
@pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2), ("V-Min", 2)],
)
def test_gradients_are_those_of_one_process(name: str, stages_per_rank: int, copy_engines: bool) -> None:
    model = make_model(2 * stages_per_rank)
    pipeline = make_pipeline(name, stages_per_rank, 8, model, copy_engines)
    torch.manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(2, 8 * 64, DIM, dtype=torch.float64, device="cuda")
        loss = loss_of(model(x), y)
        loss.backward()
        losses: list[torch.Tensor] = []
        pipeline.step(x, target=y, losses=losses)
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
        with torch.no_grad():
            expected = model(x)
        found = pipeline.eval(x)
        if found is not None:
            torch.testing.assert_close(found, expected)
    for index, stage in pipeline.stages.items():
        for parameter, expected in zip(stage.submod.parameters(), model[index].parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)


class Slow(nn.Module):
    """Raises at the `at`-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM).cuda()
        self.calls, self.at = 0, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise ArithmeticError("the stage has broken")
        return self.linear(x)


@on_ranks(2, timeout_s=110)
@pytest.mark.parametrize("copy_engines", [True, False])
@pytest.mark.parametrize("broken_rank", [0, 1])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_rank_that_fails_ends_the_step_of_all(copy_engines: bool, broken_rank: int, is_ahead: bool) -> None:
    rank = disttrain.get_rank()
    stage = PipelineStage(Slow(14 if rank == broken_rank else -1), rank, 2, "cuda")
    pipeline = get_schedule_class("1F1B")(stage, 4, loss_fn=loss_of, copy_engines=copy_engines)
    x = torch.randn(16, DIM, device="cuda")
    text = ""
    for _ in range(500):
        try:
            pipeline.step(x, target=x)
        except (ArithmeticError, DisttrainError) as error:
            text = str(error)
            break
        if is_ahead:
            time.sleep(0.02)
        else:
            torch.cuda.synchronize()
    assert "the stage has broken" in text
    # Whatever was waited for, nothing waits for ever.
    torch.cuda.synchronize()


@on_ranks(2, timeout_s=110)
def test_one_pipeline_after_another_and_in_turns() -> None:
    model = make_model(4)
    pipelines = [
        make_pipeline(name, 2, 8, model, copy_engines=True)
        for name in ("LoopedBFS", "ZBVZeroBubble", "Interleaved1F1B")
    ]
    torch.manual_seed(1)
    x, y = torch.randn(2, 8 * 64, DIM, dtype=torch.float64, device="cuda")
    for _ in range(3):
        loss_of(model(x), y).backward()
        for pipeline in pipelines:
            pipeline.step(x, target=y)
    for pipeline in pipelines:
        for index, stage in pipeline.stages.items():
            for parameter, expected in zip(stage.submod.parameters(), model[index].parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, expected.grad)


class Resting(torch.autograd.Function):
    """Takes the GPU's time in forward and in backward, and hardly any of its cores."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES // 10)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES // 10)
        return grad.clone()


class Rest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Resting.apply(x * self.weight)


@on_ranks(2, timeout_s=110)
def test_children_of_an_overlap_run_side_by_side() -> None:
    rank, num_microbatches = disttrain.get_rank(), 12
    plan = make_schedule("DualPipeV", 2, num_microbatches)
    apart = [tuple(part for action in actions for part in action.parts) for actions in plan.ranks]
    took_s = []
    x = torch.randn(num_microbatches, DIM, device="cuda")
    for one in (plan, plan.with_ranks(apart)):
        stages = [PipelineStage(Rest(), index, 4, "cuda") for index in plan.placement.stages[rank]]
        pipeline = PipelineSchedule(stages, one, loss_of)
        for _ in range(3):
            disttrain.barrier()
            torch.cuda.synchronize()
            begin_s = time.monotonic()
            pipeline.step(x, target=x)
            torch.cuda.synchronize()
            end_s = time.monotonic()
        took_s.append(end_s - begin_s)
    # Forward and backward take as long here, so that each OVERLAP halves.
    unit = Costs(forward_s=1, backward_s=1, backward_input_s=1, backward_weight_s=0)
    expected = simulate(plan, replace(unit, overlap_saves=1)).makespan_s / simulate(plan, unit).makespan_s
    assert took_s[0] / took_s[1] < expected + 0.1


class Late(nn.Module):
    """Takes the GPU a while, and the host no time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        return x


CYCLES = 100_000_000


@on_ranks(2, timeout_s=110)
def test_the_host_is_not_far_ahead_of_evaluations() -> None:
    rank = disttrain.get_rank()
    pipeline = get_schedule_class("1F1B")(PipelineStage(Late(), rank, 2, "cuda"), 2, loss_fn=loss_of)
    x = torch.randn(4, DIM, device="cuda")
    pipeline.eval(x)
    torch.cuda.synchronize()
    begin_s = time.monotonic()
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    slept_s = time.monotonic() - begin_s
    begin_s = time.monotonic()
    for _ in range(12):
        pipeline.eval(x)
    # Of 12 passes with two such waits each the host has seen the end of all but the last.
    assert time.monotonic() - begin_s > 16 * slept_s
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="ranks that share a GPU do not share memory")
@on_ranks(2)
def test_what_follows_a_future_comes_after_the_message() -> None:
    rank = disttrain.get_rank()
    group = disttrain.group.WORLD
    channels = open_channels(group, torch.device("cuda"), [(0, 1)], 4 << 20, 2)
    assert channels is not None
    for number in range(1, 7):
        tensor = torch.zeros(1 << 20, device="cuda")
        if rank == 0:
            # Late on purpose.
            torch.cuda._sleep(50_000_000)
            tensor.fill_(number)
            channels.send(tensor, 1).get_future().wait()
        else:
            total = channels.receive(tensor, 0).get_future().then(lambda done: done.value()[0].sum())
            assert total.wait().item() == number << 20
    torch.cuda.synchronize()
    disttrain.barrier()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_torch_does_not_warn_of_the_communicators() -> None:
    done = launched(2, EXAMPLES / "pipeline.py", "--schedule", "1F1B", "ZBV", has_gpus=True)
    assert "ZBVZeroBubble, step 7: loss" in done.stdout
    assert "unbatched P2P" not in done.stderr
