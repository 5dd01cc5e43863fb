"""Modules of all kinds as stages: checkpointed, compiled, with dropout, buffers and hooks, under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.errors import DisttrainError
from disttrain.pipelining import Microbatches, PipelineSchedule, PipelineStage, make_schedule
from disttrain.testing import run_threads
from tests.cases.pipelines import DIM, Case, mean_square, mlp, rows, run_rank, run_whole, same_as_whole

SCHEDULES = ["1F1B", "ZB-H1"]


def case(stages: list[nn.Module], **more: Any) -> Case:
    return Case(stages, (rows(8),), rows(8, seed=2), **more)


class Checkpointed(nn.Module):
    """Counts how often its block runs."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.use_reentrant = use_reentrant
        self.num_runs = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        return self.block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The reentrant kind wants an input with a gradient, which the batch has not.
        if not torch.is_grad_enabled() or (self.use_reentrant and not x.requires_grad):
            return self.block(x)
        return checkpoint(self.run, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activation_checkpointing(schedule: str) -> None:
    """Each forward is computed once more, and not twice."""
    stages: list[nn.Module] = [Checkpointed(stage, use_reentrant=False) for stage in mlp(3)]
    for result in same_as_whole(case(stages), schedule, 3):
        assert [stage.num_runs for stage in result.stages.values()] == [2 * 4 * 2]


def test_reentrant_checkpointing() -> None:
    same_as_whole(case([Checkpointed(stage, use_reentrant=True) for stage in mlp(3)]), "1F1B", 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_see_each_microbatch_once(schedule: str) -> None:
    """As if microbatches were batches: statistics are of each by itself. Evaluating changes them in no other way."""
    stages = [nn.Sequential(stage, nn.BatchNorm1d(DIM).double()) for stage in mlp(3)]
    same_as_whole(case(stages), schedule, 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_compiled_blocks(schedule: str, num_stages: int) -> None:
    stages = mlp(num_stages)
    for stage in stages:
        stage.compile(backend="aot_eager")
    # Tracing by several threads at once is more than the compiler promises: one rank, two processes for the rest.
    num_ranks = 1
    plan = make_schedule("InterleavedZeroBubble" if schedule == "ZB-H1" else "Interleaved1F1B", 1, 4, num_stages)
    same_as_whole(case(stages), plan, num_ranks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast(schedule: str) -> None:
    class Lowered(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.module(x)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean_square(output.float(), target.float())

    stages: list[nn.Module] = [Lowered(stage.float()) for stage in mlp(3)]
    given = Case(stages, (rows(8).float(),), rows(8, seed=2).float(), loss_fn)
    same_as_whole(given, schedule, 3)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_hooks_are_called_once_per_microbatch(name: str) -> None:
    """Of parameters and modules; what a hook makes of a gradient is what the parameter gets."""
    calls: dict[str, int] = {}

    def count(what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[what] = calls.get(what, 0) + 1

        return hook

    # Not in the threads of the ranks, which share one random generator.
    stages = mlp(3)

    def rank() -> list[torch.Tensor]:
        index = disttrain.get_rank()
        stage = stages[index]
        stage.register_forward_hook(count(f"forward {index}"))
        stage[1].register_full_backward_hook(count(f"backward {index}"))
        stage[0].weight.register_hook(lambda grad: 2 * grad)
        stage[0].bias.register_post_accumulate_grad_hook(count(f"accumulated {index}"))
        runner = PipelineSchedule(PipelineStage(stage, index, 3, "cpu"), make_schedule(name, 3, 4), mean_square)
        runner.step(*((rows(8),) if index == 0 else ()), target=rows(8, seed=2) if index == 2 else None)
        return [parameter.grad for parameter in stage.parameters()]

    found = run_threads(3, rank)
    kinds = ("accumulated", "backward", "forward")
    assert calls == {f"{kind} {index}": 4 for kind in kinds for index in range(3)}
    expected = run_whole(case(mlp(3), num_steps=1), 4)
    for index, (weight, bias) in enumerate(found):
        layer = expected.stages[index][0]
        torch.testing.assert_close(weight, 2 * layer.weight.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(bias, layer.bias.grad, rtol=1e-12, atol=1e-12)


class Attention(nn.Module):
    """Of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.transpose(-1, -2)).softmax(-1) @ v


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "Interleaved1F1B"])
def test_microbatches_of_several_lengths(name: str) -> None:
    torch.manual_seed(0)
    plan = make_schedule(name, 2, 4)
    stages: list[nn.Module] = [Attention() for _ in range(plan.num_stages)]
    lengths = (3, 5, 1, 4)
    x = Microbatches(torch.randn(2, length, DIM).double() for length in lengths)
    y = Microbatches(torch.randn(2, length, DIM).double() for length in lengths)
    options = {"dynamic_shapes": True, "output_merge_spec": Microbatches}
    found = same_as_whole(Case(stages, (x,), y, options=options), plan)
    outputs = found[plan.placement.ranks[-1]].outputs[0]
    assert isinstance(outputs, Microbatches)
    assert [output.shape[1] for output in outputs] == list(lengths)


def test_another_length_in_each_step() -> None:
    def rank() -> list[Any]:
        index = disttrain.get_rank()
        torch.manual_seed(index)
        stage = PipelineStage(Attention(), index, 2, "cpu")
        runner = PipelineSchedule(stage, make_schedule("1F1B", 2, 4), mean_square, dynamic_shapes=True)
        shapes: list[Any] = []
        for length in (3, 5, 2):
            x = torch.randn(8, length, DIM).double()
            output = runner.step(*((x,) if index == 0 else ()), target=x if index == 1 else None)
            shapes.append(None if output is None else list(output.shape))
            output = runner.eval(*((x[:4],) if index == 0 else ()))
            shapes.append(None if output is None else list(output.shape))
        return shapes

    assert run_threads(2, rank)[1] == [[8, 3, DIM], [4, 3, DIM], [8, 5, DIM], [4, 5, DIM], [8, 2, DIM], [4, 2, DIM]]


def test_outputs_of_several_lengths_are_not_joined() -> None:
    x = Microbatches(torch.randn(2, length, DIM).double() for length in (3, 5, 1, 4))
    case = Case([Attention(), Attention()], (x,), x, options={"dynamic_shapes": True})
    with pytest.raises(DisttrainError, match=r"shape \[2, 3, 6\] in the first microbatch and \[2, 5, 6\]") as raised:
        run_threads(2, run_rank, case, make_schedule("1F1B", 2, 4))
    assert "output_merge_spec=Microbatches" in str(raised.value)
    with pytest.raises(DisttrainError, match=r"args\[0\] holds 4 microbatches, and there are 5"):
        run_threads(1, run_rank, Case([Attention()], (x,), x), make_schedule("GPipe", 1, 5))


def test_evaluation() -> None:
    """Before the first step and between steps; losses where there is a target; nothing gets a gradient."""
    (expected,) = [run_whole(case(mlp(2), num_steps=1), 4)]

    def rank() -> None:
        index = disttrain.get_rank()
        stage = mlp(2)[index]
        runner = PipelineSchedule(PipelineStage(stage, index, 2, "cpu"), make_schedule("1F1B", 2, 4), mean_square)
        x, y = ((rows(8),), None) if index == 0 else ((), rows(8, seed=2))
        for turn in range(2):
            losses: list[torch.Tensor] = []
            output = runner.eval(*x, target=y, losses=losses)
            assert runner.eval(*x, target=y, return_outputs=False) is None
            assert len(losses) == 4 * index
            if index == 1:
                torch.testing.assert_close(output, expected.outputs[0].detach(), rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(losses, expected.losses[0], rtol=1e-12, atol=1e-12)
                assert not output.requires_grad
            assert all((parameter.grad is None) == (turn == 0) for parameter in stage.parameters())
            assert runner.step(*x, target=y, return_outputs=False) is None
            with torch.inference_mode():
                runner.eval(*x)
            with torch.no_grad():
                runner.eval(*x)

    run_threads(2, rank)
