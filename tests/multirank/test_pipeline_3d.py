"""Pipelines of sharded and cut stages: the gradients of a single process, whatever the schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import tp
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from disttrain.pipelining import PipelineStage, get_schedule_class, make_schedule
from disttrain.testing import run_threads

DIM, NUM_MICROBATCHES = 8, 4
PP_DP, PP_TP, ALL = (2, 2, 1), (2, 1, 2), (2, 2, 2)
SCHEDULES = [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_model(num_stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(num_stages))).double()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def whole(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def train(
    models: list[list[nn.Module]],
    name: str,
    sizes: tuple[int, int, int],
    x: torch.Tensor,
    y: torch.Tensor,
    policy: MixedPrecisionPolicy,
    options: dict[str, Any],
) -> dict[int, list[torch.Tensor]]:
    """On each rank: two steps; the whole gradients of its stages."""
    modules = models[disttrain.get_rank()]
    mesh = disttrain.init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    group = mesh["pp"].get_group()
    placement = make_schedule(name, sizes[0], NUM_MICROBATCHES, len(modules) // sizes[0]).placement
    stages = []
    for index in placement.stages[group.group_rank]:
        module = modules[index]
        if sizes[2] > 1:
            plan = {"*.up": tp.ColwiseParallel(), "*.down": tp.RowwiseParallel()}
            tp.parallelize_module(module, mesh["tp"], plan)
        if sizes[1] > 1:
            for block in module:  # type: ignore[attr-defined]
                fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
            fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        stages.append(PipelineStage(module, index, len(modules), "cpu", group=group))
    schedule = get_schedule_class(name)(stages, NUM_MICROBATCHES, loss_fn=loss_of, **options)
    own = mesh["dp"].get_local_rank()
    inputs, target = x.chunk(sizes[1])[own], y.chunk(sizes[1])[own]
    for _ in range(2):
        schedule.step(inputs, target=target)
        schedule.eval(inputs)
    for stage in stages:
        for module in stage.submod.modules():
            assert not isinstance(module, FSDPModule) or all(isinstance(one, DTensor) for one in module.parameters())
    return {stage.stage_index: [whole(one.grad) for one in stage.submod.parameters()] for stage in stages}


def check(
    name: str, sizes: tuple[int, int, int], stages_per_rank: int, policy: MixedPrecisionPolicy, **options: Any
) -> None:
    model = make_model(sizes[0] * stages_per_rank)
    torch.manual_seed(1)
    x, y = torch.randn(2, 4 * NUM_MICROBATCHES, DIM).double()
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    copies = [list(copy.deepcopy(model)) for _ in range(num_ranks)]
    for _ in range(2):
        loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]
    tolerance = 1e-12 if policy.param_dtype is None else 2e-2
    for grads in run_threads(num_ranks, train, copies, name, sizes, x, y, policy, options):
        for index, found in grads.items():
            expected = [parameter.grad for parameter in model[index].parameters()]
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# Each schedule with each axis, each pair of axes with stages of one and of two on a rank.
@pytest.mark.parametrize(
    ("sizes", "name", "stages_per_rank"),
    [
        *((PP_DP, *schedule) for schedule in SCHEDULES),
        *((PP_TP, *schedule) for schedule in (SCHEDULES[0], SCHEDULES[1], SCHEDULES[4])),
        *((ALL, *schedule) for schedule in (SCHEDULES[2], SCHEDULES[3])),
    ],
)
def test_all_schedules_give_the_single_process_gradients(
    name: str, stages_per_rank: int, sizes: tuple[int, int, int]
) -> None:
    check(name, sizes, stages_per_rank, MixedPrecisionPolicy())


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_are_gathered_for_each_run_of_computations_where_only_one_may_be_whole(name: str) -> None:
    check(name, ALL, 2, MixedPrecisionPolicy(), max_unsharded=1)


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_low_precision_parameters_are_reduced_in_a_higher_one(name: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check(name, PP_DP, 2 if name != "1F1B" else 1, policy)
