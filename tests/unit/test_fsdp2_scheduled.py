"""Sharded modules that a schedule gathers, frees and reduces, driven by hand; ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import disttrain
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from disttrain.fsdp2.state import state_of
from disttrain.pipelining import Backward, split_layers
from disttrain.testing import run_threads
from disttrain.tp import parallelize_module
from tests.cases.fsdp2 import SCATTER, recorded
from tests.cases.fsdp2_scheduled import (
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    Pipeline,
    assert_same_gradients,
    backward_of,
    loss,
    own_tokens,
    schedule,
    shard,
    two_stages,
)
from tests.cases.tensor_parallel import Decoder, check_gradients, decoder_plan
from tests.multirank import models

GATHER = "all_gather_into_tensor"


def check_step(num_ranks: int, text: str, cut: Callable[[nn.Module], nn.Module], reference: nn.ModuleList) -> None:
    """One step on threads equals that of a single process."""
    whole = copy.deepcopy(reference)
    backward_of(whole)

    def body() -> None:
        stages = [cut(stage) for stage in reference]
        schedule(*stages)
        pipeline = Pipeline(stages, own_tokens())
        pipeline.run(text)
        pipeline.finish()
        assert_same_gradients(stages, whole)

    run_threads(num_ranks, body)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("text", [ONE_F_ONE_B, ZERO_BUBBLE], ids=["1f1b", "zero bubble"])
def test_gradients_equal_those_of_a_single_process(text: str, num_ranks: int) -> None:
    check_step(num_ranks, text, shard, two_stages())


def test_a_stage_may_be_one_group() -> None:
    check_step(2, ZERO_BUBBLE, lambda stage: shard(stage, blocks=False), two_stages())


def test_blocks_may_be_sharded_alone() -> None:
    reference = two_stages()
    whole = copy.deepcopy(reference)
    backward_of(whole)

    def body() -> None:
        stages = [shard(stage, root=False) for stage in reference]
        schedule(*stages)
        pipeline = Pipeline(stages, own_tokens())
        pipeline.run(ZERO_BUBBLE)
        pipeline.finish()
        assert_same_gradients([stages[0][1:], stages[1][:1]], nn.ModuleList([whole[0][1:], whole[1][:1]]))

    run_threads(2, body)


def test_a_root_may_have_no_parameters_of_its_own() -> None:
    def cut(stage: nn.Module) -> nn.Module:
        stage = shard(stage, root=False)
        for layer in stage:
            if state_of(layer) is None:
                fully_shard(layer)
        return fully_shard(stage)

    check_step(2, ZERO_BUBBLE, cut, two_stages())


@pytest.mark.parametrize("root", [True, False])
def test_modules_may_be_one_group_together(root: bool) -> None:
    reference = two_stages()
    whole = copy.deepcopy(reference)
    backward_of(whole)

    def body() -> None:
        stages = [shard(stage, root=False, blocks=False) for stage in reference]
        for stage in stages:
            if len(stage) == 3:
                fully_shard(stage[1])
            fully_shard([stage[0], stage[-1]])
            if root:
                fully_shard(stage)
        schedule(*stages)
        pipeline = Pipeline(stages, own_tokens())
        with recorded() as names:
            pipeline.run(ZERO_BUBBLE)
        assert names.count(SCATTER) == 3
        pipeline.finish()
        assert_same_gradients(stages, whole)

    run_threads(2, body)


def test_replicas_are_summed_over() -> None:
    def cut(stage: nn.Module) -> nn.Module:
        return shard(stage, mesh=disttrain.init_device_mesh("cpu", (2, 2)))

    check_step(4, ZERO_BUBBLE, cut, two_stages())


def test_shards_may_be_kept_on_the_host() -> None:
    check_step(2, ZERO_BUBBLE, lambda stage: shard(stage, offload_policy=CPUOffloadPolicy()), two_stages())


@pytest.mark.parametrize("whole_stage", [False, True], ids=["a layer", "all of a stage"])
def test_frozen_parameters_get_nothing(whole_stage: bool) -> None:
    reference = two_stages()
    reference[0][0].requires_grad_(False)
    reference[0].requires_grad_(not whole_stage)
    reference[1][0].up.weight.requires_grad_(False)
    check_step(2, ONE_F_ONE_B, shard, reference)


def test_parameters_may_be_tied_within_a_stage() -> None:
    reference = nn.ModuleList([models.TinyModel().double().init(3)])
    text = "0UNSHARD 0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0I3 0W1 0W2 0W3 0RESHARD 0REDUCE_GRAD"
    check_step(2, text, shard, reference)


def test_several_steps_and_evaluation_between_them() -> None:
    reference = two_stages()
    whole = copy.deepcopy(reference)
    expected = []
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    for step in range(3):
        backward_of(whole, step)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(nn.Sequential(*whole)(models.batch(0)).detach())
    backward_of(whole, 3)

    def body() -> None:
        stages = [shard(stage) for stage in reference]
        optimizer = torch.optim.SGD(nn.ModuleList(stages).parameters(), lr=0.5)
        schedule(*stages)
        for step in range(3):
            pipeline = Pipeline(stages, own_tokens(step))
            pipeline.run(ZERO_BUBBLE)
            pipeline.finish()
            optimizer.step()
            optimizer.zero_grad()
            for stage in stages:
                stage.set_is_scheduled(False)
            with torch.no_grad(), recorded() as names:
                torch.testing.assert_close(nn.Sequential(*stages)(models.batch(0)), expected[step])
            assert names == [GATHER] * 5
            schedule(*stages)
        # Ordinary backwards are as ever, too.
        for stage in stages:
            stage.set_is_scheduled(False)
        tokens = own_tokens(3)
        x = stages[1](stages[0](tokens))
        nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten()).backward()
        assert_same_gradients(stages, whole)

    run_threads(2, body)


def test_gradients_without_synchronisation_go_into_the_next_step() -> None:
    reference = two_stages()
    for step in range(2):
        backward_of(reference, step)
    clean = two_stages()

    def body() -> None:
        stages = [shard(stage) for stage in clean]
        schedule(*stages)
        for step in range(2):
            for stage in stages:
                stage.set_requires_gradient_sync(step == 1)
            pipeline = Pipeline(stages, own_tokens(step))
            with recorded() as names:
                pipeline.run(ZERO_BUBBLE)
            pipeline.finish()
            assert names.count(SCATTER) == 5 * step
        assert_same_gradients(stages, reference)
        # A third step's is added to the shards' own.
        pipeline = Pipeline(stages, own_tokens(0))
        before = [p.grad.to_local().clone() for p in stages[0].parameters()]
        pipeline.run(ONE_F_ONE_B)
        pipeline.finish()
        assert all((p.grad.to_local() - b).abs().sum() > 0 for p, b in zip(stages[0].parameters(), before, strict=True))

    run_threads(2, body)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64], ids=str)
def test_modules_may_be_cut_by_tensor_parallelism(reduce_dtype: torch.dtype | None) -> None:
    torch.manual_seed(4)
    reference = Decoder().float() if reduce_dtype else Decoder().double()
    tokens = torch.randint(0, 16, (8, 8))
    whole = copy.deepcopy(reference)
    (loss(whole(tokens[:4]), tokens[:4]) / 2 + loss(whole(tokens[4:]), tokens[4:]) / 2).backward()

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh["tp"], decoder_plan(2, sequence=True))
        split_layers(model)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(None, reduce_dtype))
        model.set_is_scheduled(True)
        backwards = [Backward(), Backward()]
        outputs = []
        model.unshard_all()
        for backward, rows in zip(backwards, tokens.chunk(2), strict=True):
            own = rows.chunk(2)[mesh["dp"].get_local_rank()]
            with backward.forward():
                outputs.append(loss(model(own), own))
        for backward, output in zip(backwards, outputs, strict=True):
            backward.backward_input([output], None, [])
        model.reshard_all()
        for backward in backwards:
            backward.backward_weight()
        model.reduce_grads(0.5)
        model.finish_grads()
        check_gradients(model, whole)

    run_threads(4, body)


def test_ranks_may_use_different_parameters() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
            return self.experts[expert](x)

    torch.manual_seed(2)
    reference = nn.ModuleList([Gated(), Gated()]).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    whole = copy.deepcopy(reference)
    # Both ranks use the first stage's; of the second's, one rank uses none at all.
    for rank in range(2):
        (whole[0](x, rank).sum() / 2).backward()
    (whole[1](x, 0).sum() / 2).backward()
    zero_grads = [whole[0].experts[2], whole[1].experts[1], whole[1].experts[2]]
    for parameter in nn.ModuleList(zero_grads).parameters():
        parameter.grad = torch.zeros_like(parameter)

    def body() -> None:
        rank = disttrain.get_rank()
        stages = [fully_shard(copy.deepcopy(stage)) for stage in reference]
        schedule(*stages)
        for stage in stages:
            stage.unshard_all()
        stages[0](x, rank).sum().backward()
        if rank == 0:
            stages[1](x, 0).sum().backward()
        for stage in stages:
            stage.reshard_all()
            stage.reduce_grads()
        stages[0].finish_grads()
        stages[1].finish_grads()
        assert_same_gradients(stages, whole)

    run_threads(2, body)


def test_outputs_without_tensors_compute_too() -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Boxing(nn.Linear):
        def forward(self, x: torch.Tensor) -> Box:
            return Box(super().forward(x).square())

    torch.manual_seed(1)
    layer = Boxing(2, 2)
    whole = copy.deepcopy(layer)
    x = torch.ones(1, 2, requires_grad=True)
    whole(x).value.sum().backward()

    def body() -> None:
        model = fully_shard(copy.deepcopy(layer))
        model.set_is_scheduled(True)
        model.unshard_all()
        given = torch.ones(1, 2, requires_grad=True)
        box = model(given)
        model.reshard_all()
        model.unshard_all()
        box.value.sum().backward()
        model.reshard_all()
        model.reduce_grads()
        model.finish_grads()
        torch.testing.assert_close(given.grad, x.grad)
        torch.testing.assert_close(model.weight.grad.full_tensor(), whole.weight.grad)

    run_threads(2, body)
