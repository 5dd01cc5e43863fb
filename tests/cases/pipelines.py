"""Pipelines on ranks that are threads, beside the same stages in one process, microbatch by microbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import disttrain
from disttrain.pipelining import (
    PipelineSchedule,
    PipelineStage,
    Schedule,
    make_schedule,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from disttrain.testing import run_threads

DIM = 6


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def run_stages(stages: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One after the other, as a pipeline calls them."""
    output: Any = args
    for stage in stages:
        output = stage(*(output if isinstance(output, tuple | list) else (output,)), **kwargs)
    return output


@dataclass(frozen=True)
class Case:
    """A pipeline, and what each of its steps is given.

    `stage_options`: more arguments of PipelineStage, by stage; `options`: of PipelineSchedule; `whole`: what the stages
    compute together; `atol`: how far gradients may be off.
    """

    stages: Sequence[nn.Module]
    args: tuple[Any, ...]
    target: Any
    loss_fn: Callable[..., torch.Tensor] | None = mean_square
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stage_options: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    loss_kwargs: Mapping[str, Any] | None = None
    whole: Callable[[Sequence[nn.Module], tuple[Any, ...], Mapping[str, Any]], Any] = run_stages
    num_steps: int = 2
    atol: float = 1e-12


@dataclass
class Result:
    """What one rank, or the one process, has at the end: by step, losses and outputs; then those of `eval`."""

    losses: list[list[torch.Tensor]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    evaluated: Any = None
    stages: dict[int, nn.Module] = field(default_factory=dict)
    runner: PipelineSchedule | None = None


def run_rank(case: Case, schedule: Schedule) -> Result:
    """This rank's part of all steps, and of one `eval`."""
    all_stages = copy.deepcopy(list(case.stages))
    own = schedule.placement.stages[disttrain.get_rank()]
    result = Result(stages={index: all_stages[index] for index in own})
    made = [
        PipelineStage(all_stages[index], index, len(all_stages), "cpu", **case.stage_options.get(index, {}))
        for index in own
    ]
    runner = result.runner = PipelineSchedule(made, schedule, case.loss_fn, **case.options)
    args = case.args if 0 in own else ()
    target = case.target if len(all_stages) - 1 in own else None
    for _ in range(case.num_steps):
        losses: list[torch.Tensor] = []
        output = runner.step(*args, target=target, losses=losses, loss_kwargs=case.loss_kwargs, **case.kwargs)
        result.outputs.append(output)
        result.losses.append(losses)
    result.evaluated = runner.eval(*args, **case.kwargs)
    return result


def run_whole(case: Case, num_microbatches: int) -> Result:
    """The same in one process."""
    stages = copy.deepcopy(list(case.stages))
    specs = case.options.get("args_chunk_spec"), case.options.get("kwargs_chunk_spec")
    args, kwargs = split_args_kwargs_into_chunks(case.args, case.kwargs, num_microbatches, *specs)
    targets = split_args_kwargs_into_chunks((case.target,), None, num_microbatches)[0]
    result = Result(stages=dict(enumerate(stages)))
    scale = 1 / num_microbatches if case.options.get("scale_grads", True) else 1.0
    for _ in range(case.num_steps):
        outputs, losses = [], []
        for own_args, own_kwargs, (target,) in zip(args, kwargs, targets, strict=True):
            output = case.whole(stages, own_args, own_kwargs)
            outputs.append(output)
            if case.loss_fn is not None:
                loss = case.loss_fn(output, target, **(case.loss_kwargs or {}))
                (loss * scale).backward()
                losses.append(loss.detach())
        result.outputs.append(merge_chunks(outputs, case.options.get("output_merge_spec")))
        result.losses.append(losses)
    with torch.no_grad():
        evaluated = [case.whole(stages, *given) for given in zip(args, kwargs, strict=True)]
    result.evaluated = merge_chunks(evaluated, case.options.get("output_merge_spec"))
    return result


def same_as_whole(case: Case, schedule: Schedule | str, num_ranks: int = 2, num_microbatches: int = 4) -> list[Result]:
    """Losses, outputs, gradients and buffers of all ranks are those of one process. Returns: the ranks' results."""
    if isinstance(schedule, str):
        schedule = make_schedule(schedule, num_ranks, num_microbatches, len(case.stages) // num_ranks)
    expected = run_whole(case, schedule.num_microbatches)
    found = run_threads(schedule.num_ranks, run_rank, case, schedule)
    for result in found:
        assert_same_state(result, expected, case.atol)
    last = found[schedule.placement.ranks[-1]]
    close(last.losses, expected.losses, case.atol)
    close(last.outputs, expected.outputs, case.atol)
    close(last.evaluated, expected.evaluated, case.atol)
    for result in found:
        if result is not last:
            assert result.outputs == [None] * case.num_steps
            assert result.losses == [[]] * case.num_steps
            assert result.evaluated is None
    return found


def assert_same_state(found: Result, expected: Result, atol: float) -> None:
    for index, stage in found.stages.items():
        names = dict(expected.stages[index].named_parameters(remove_duplicate=False))
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            grad = names[name].grad
            # What nobody uses gets a gradient all the same, of zeros: who sends it does not know.
            if grad is None and parameter.requires_grad and parameter.grad is not None:
                grad = torch.zeros_like(parameter)
            close(parameter.grad, grad, atol, f"stage {index}, {name}")
        close(dict(stage.named_buffers()), dict(expected.stages[index].named_buffers()), atol)


def close(found: Any, expected: Any, atol: float, what: str = "") -> None:
    """Nests of tensors and plain values."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(
            found.detach(), expected.detach(), rtol=atol, atol=atol, msg=lambda text: f"{what}: {text}"
        )
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected)
        close(list(found.values()), list(expected.values()), atol, what)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other, atol, what)
    else:
        assert found == expected


def mlp(num_stages: int, dim: int = DIM) -> list[nn.Module]:
    """Stages that squash, in fp64; the same also where several threads make them at once."""
    generator = torch.Generator().manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(dim, dim), nn.Tanh()).double() for _ in range(num_stages)]
    with torch.no_grad():
        for parameter in (one for stage in stages for one in stage.parameters()):
            parameter.uniform_(-(dim**-0.5), dim**-0.5, generator=generator)
    return stages


def rows(num_rows: int, dim: int = DIM, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
