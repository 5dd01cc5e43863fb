"""A split backward of stages that other kinds of parallelism have cut."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import fully_shard
from disttrain.pipelining import Backward, split_layers
from disttrain.testing import run_threads
from disttrain.tp import parallelize_module
from tests.cases.pipeline_backward import DIM, assert_equal
from tests.cases.tensor_parallel import Block, block_plan


def test_sharded_stages() -> None:
    """The last microbatch's gradients are reduced, and with them those of the others."""

    whole = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM)) for _ in range(2)))

    def run(splits: bool) -> list[torch.Tensor]:
        stage = copy.deepcopy(whole)
        if splits:
            assert split_layers(stage) == 4
        for block in stage:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(stage, reshard_after_forward=False)
        stage.set_reshard_after_backward(False)
        for microbatch in range(3):
            is_last = microbatch == 2
            stage.set_requires_gradient_sync(is_last)
            stage.set_is_last_backward(is_last)
            x, backward = torch.full((2, DIM), 1.0 + disttrain.get_rank()).requires_grad_(), Backward()
            with backward.forward():
                loss = stage(x).square().sum()
            if splits and not is_last:
                backward.backward_input([loss], None, [x])
                backward.backward_weight()
            else:
                backward.backward([loss], None, [x])
        for module in [stage, *stage]:
            module.reshard()
        return [p.grad.full_tensor() for p in stage.parameters()]

    def on_rank() -> None:
        assert_equal(run(splits=True), run(splits=False))

    run_threads(2, on_rank)


@pytest.mark.parametrize("sequence", [False, True])
def test_stages_cut_by_tensor_parallel(sequence: bool) -> None:
    block, given = Block(DIM), torch.randn(2, 4, DIM)

    def run(splits: bool) -> tuple[list[torch.Tensor], int]:
        mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        stage = parallelize_module(copy.deepcopy(block), mesh, block_plan(2, sequence=sequence))
        split_layers(stage)
        x, backward = given.clone().requires_grad_(), Backward()
        with backward.forward():
            loss = stage(x).square().sum()
        num_kept = 0
        if splits:
            found = backward.backward_input([loss], None, [x])
            num_kept = len(backward._kept)
            backward.backward_weight()
        else:
            found = backward.backward([loss], None, [x])
        grads = [p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for p in stage.parameters()]
        return [*found, *grads], num_kept

    def on_rank() -> None:
        (split, num_kept), (whole, _) = run(splits=True), run(splits=False)
        assert num_kept >= 7
        assert_equal(split, whole)

    run_threads(2, on_rank)
