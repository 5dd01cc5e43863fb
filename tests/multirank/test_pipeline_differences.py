"""What pipelines do on purpose otherwise than torch.distributed.pipelining's, where no other test shows it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import disttrain
from disttrain.errors import ScheduleError
from disttrain.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks

DIM, NUM_MICROBATCHES = 4, 8


def modules(num_stages: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Tanh(), nn.Linear(DIM, DIM)).double() for _ in range(num_stages)]


def rows(num_rows: int = 2 * NUM_MICROBATCHES) -> torch.Tensor:
    return torch.randn(num_rows, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def own_stage(whole: Sequence[nn.Module], **options: Any) -> PipelineStage:
    rank = disttrain.get_rank()
    return PipelineStage(copy.deepcopy(whole[rank]), rank, len(whole), "cpu", **options)


def grads_of(module: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in module.parameters() if one.grad is not None]


def test_gradients_of_earlier_steps_are_not_divided_again() -> None:
    """The number of microbatches divides the gradient of each loss."""
    whole = modules()

    def train() -> list[torch.Tensor]:
        stage = own_stage(whole)
        schedule = Schedule1F1B(stage, NUM_MICROBATCHES, mean_square)
        for _ in range(3):
            schedule.step(rows(), target=rows())
        return grads_of(stage.submod)

    found = run_threads(2, train)
    (3 * mean_square(nn.Sequential(*whole)(rows()), rows())).backward()  # type: ignore[no-untyped-call]
    for module, grads in zip(whole, found, strict=True):
        torch.testing.assert_close(grads, grads_of(module))


def test_eval_makes_no_graphs_and_outputs_have_none() -> None:
    whole = modules()

    def outputs() -> tuple[list[bool], list[torch.Tensor]]:
        stage = own_stage(whole)
        grad_modes = []
        stage.submod.register_forward_hook(lambda *_: grad_modes.append(torch.is_grad_enabled()))
        schedule = Schedule1F1B(stage, 2, mean_square)
        made = [schedule.step(rows(), target=rows()), schedule.eval(rows())]
        return grad_modes, [one for one in made if one is not None]

    first, last = run_threads(2, outputs)
    assert first == ([True, True, False, False], [])
    assert last[0] == [True, True, False, False]
    assert [one.requires_grad for one in last[1]] == [False, False]
    torch.testing.assert_close(last[1][0], nn.Sequential(*whole)(rows()).detach())


def test_what_has_been_sent_is_let_go_of() -> None:
    """A linear layer's result is needed by nobody here: backward begins at the edge of the graph that it came from."""
    whole = modules()

    def num_kept() -> int:
        stage = own_stage(whole)
        schedule = ScheduleGPipe(stage, 3 * NUM_MICROBATCHES, mean_square)
        schedule.step(x, target=x)
        sent: list[StorageWeakRef] = []
        kept: list[int] = []
        stage.submod.register_forward_hook(lambda _m, _i, out: sent.append(StorageWeakRef(out.untyped_storage())))
        for parameter in stage.submod.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: kept.append(sum(not one.expired() for one in sent)),
            )
        schedule.step(x, target=x)
        return kept[0]

    x = rows(3 * NUM_MICROBATCHES)
    # The last few may still be under way.
    assert run_threads(2, num_kept)[0] <= NUM_MICROBATCHES


def test_buffers_are_for_what_is_in_use() -> None:
    """Not one for each microbatch."""
    whole = modules()

    def addresses() -> set[int]:
        stage = own_stage(whole)
        found: set[int] = set()
        stage.submod.register_forward_pre_hook(lambda _, args: found.add(args[0].data_ptr()))
        schedule = Schedule1F1B(stage, 3 * NUM_MICROBATCHES, mean_square)
        x = rows(3 * NUM_MICROBATCHES)
        for _ in range(2):
            schedule.step(x, target=x, return_outputs=False)
        return found

    # Three at a time; whether one is free already when the next is taken, is a matter of time.
    assert len(run_threads(2, addresses)[1]) < 2 * NUM_MICROBATCHES


def test_no_forward_is_run_to_learn_shapes() -> None:
    whole = modules()

    def num_forwards() -> int:
        stage = own_stage(whole)
        calls = []
        stage.submod.register_forward_hook(lambda *_: calls.append(1))
        Schedule1F1B(stage, NUM_MICROBATCHES, mean_square).step(rows(), target=rows())
        return len(calls)

    assert run_threads(2, num_forwards) == [NUM_MICROBATCHES] * 2


def test_dw_builder_is_refused() -> None:
    def text() -> str:
        with pytest.raises(ScheduleError) as caught:
            own_stage(modules(), dw_builder=lambda: None)
        return str(caught.value)

    assert all("dw_builder is given; here a backward is divided by layers" in one for one in run_threads(2, text))


@on_ranks(2, 3)
def test_what_fails_on_one_rank_is_told_to_all() -> None:
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("the cat is on the keyboard")

    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    module = Fails(DIM, DIM) if rank == 1 else nn.Linear(DIM, DIM)
    stage = PipelineStage(module.double(), rank, num_ranks, "cpu")
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, mean_square)
    kind = RuntimeError if rank == 1 else ScheduleError
    with pytest.raises(kind, match="the cat is on the keyboard") as caught:
        schedule.step(rows(), target=rows())
    if rank != 1:
        assert "another rank has failed: rank 1" in str(caught.value)
    with pytest.raises(ScheduleError, match=r"an earlier step has failed: .*the cat is on the keyboard"):
        schedule.step(rows(), target=rows())
