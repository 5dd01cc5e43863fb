"""Pipelines whose stages have experts over ranks: the gradients of transformers' own model in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import tp
from disttrain.dtensor import DTensor
from disttrain.experts import shard_experts, use_experts
from disttrain.fsdp2 import fully_shard
from disttrain.pipelining import PipelineStage, clip_grad_norm_, get_schedule_class, make_schedule, split_blocks
from disttrain.testing import run_threads
from tests.cases.expert_transformers import expert_model, loss_of, loss_of_logits, sentences

NUM_MICROBATCHES = 4
SCHEDULES = [("1F1B", 1, 1), ("Interleaved1F1B", 2, 1), ("ZBVZeroBubble", 2, 1), ("DualPipeV", 2, 1), ("1F1B", 1, 2)]
"""With the stages of each rank, and the ranks that each expert is cut over."""


def train(models: list[nn.Module], name: str, stages_per_rank: int, num_tp: int) -> dict[str, torch.Tensor]:
    """On each rank: a step of the pipeline; the norm of all gradients, and those of its stages, by name."""
    mesh = disttrain.init_device_mesh("cpu", (2, 2, num_tp), mesh_dim_names=("pp", "ep", "tp"))
    model, group = models[disttrain.get_rank()], mesh["pp"].get_group()
    use_experts(model, report=lambda _: None)
    split = split_blocks(model, 2 * stages_per_rank)
    schedule = make_schedule(name, 2, NUM_MICROBATCHES, stages_per_rank)
    stages = []
    for index in schedule.placement.stages[group.group_rank]:
        module = split.stages[index]
        if num_tp > 1:
            tp.parallelize_module(module, mesh["tp"], tp.plan_for(module))
        shard_experts(module, mesh["ep"])
        fully_shard(module, mesh=mesh["ep"])
        stages.append(PipelineStage(module, index, 2 * stages_per_rank, "cpu", group=group))
    runner = get_schedule_class(name)(stages, NUM_MICROBATCHES, loss_fn=lambda out, y: loss_of_logits(out.logits, y))
    tokens = sentences(0, 16).chunk(2)[mesh["ep"].get_local_rank()]
    # Evaluations around it leave nothing behind.
    runner.eval(tokens, target=tokens)
    runner.step(tokens, target=tokens)
    runner.eval(tokens, target=tokens)
    named = [pair for stage in stages for pair in stage.submod.named_parameters()]
    grads = {at: one.grad.full_tensor() for at, one in named if isinstance(one.grad, DTensor)}
    assert len(grads) == len(named)
    grads["norm"] = clip_grad_norm_(runner, 1.0)
    return grads


@pytest.mark.parametrize(("name", "stages_per_rank", "num_tp"), SCHEDULES)
def test_experts_in_stages(name: str, stages_per_rank: int, num_tp: int) -> None:
    whole = expert_model("mixtral" if num_tp == 1 else "qwen3_moe", 3, num_hidden_layers=4)
    copies = [copy.deepcopy(whole) for _ in range(4 * num_tp)]
    loss_of(whole, sentences(0, 16)).backward()
    found: list[dict[str, Any]] = run_threads(4 * num_tp, train, copies, name, stages_per_rank, num_tp)
    norm = torch.stack([one.grad.norm() for one in whole.parameters()]).norm()
    for grads in found:
        torch.testing.assert_close(grads.pop("norm"), norm)
        for at, grad in grads.items():
            torch.testing.assert_close(grad, whole.get_parameter(at).grad, msg=lambda text, at=at: f"{at}: {text}")
    assert {at for grads in found for at in grads} == {at for at, _ in whole.named_parameters()}
