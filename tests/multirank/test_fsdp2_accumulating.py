"""Gradients of several backward passes, of unused parameters, on the host: when they are reduced, in which dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.fsdp2 import SCATTER, assert_same_gradients, backward_of_both, own_rows, pair, recorded, sharded
from tests.multirank import models


@on_ranks(2)
def test_unused_parameters_take_part_once_for_each_backward_on_request() -> None:
    class Gated(models.Block):
        """Uses one of two experts, another one on each rank."""

        def __init__(self, dim: int, hidden: int) -> None:
            super().__init__(dim, hidden)
            self.experts = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor, expert: int = 0) -> torch.Tensor:
            return super().forward(self.experts[expert](x))

    class Model(models.TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Gated(7, 13) for _ in range(3))

        def forward(self, tokens: torch.Tensor, expert: int = 0) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, expert)
            return self.head(x)

    reference = Model().double().init(0)
    model = sharded(copy.deepcopy(reference))
    model.set_reduce_scatter_unused_params(True)
    rank = disttrain.get_rank()
    for step in range(2):
        with recorded() as names:
            (model(own_rows(step), rank).square().mean()).backward()
        assert names.count(SCATTER) == 4
        for expert, rows in enumerate(models.batch(step).chunk(2)):
            (reference(rows, expert).square().mean() / 2).backward()
    for block in reference.blocks:
        block.experts[2].weight.grad = torch.zeros(7, 7).double()
    assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sync at the end", "sync each time"])
def test_gradients_are_summed_in_the_dtype_of_their_reduction(kind: str) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(nn.Linear(1, 4, bias=False), mp_policy=policy)
    # 1 + 1/512 is no bfloat16.
    for micro, scale in enumerate((1.0, 2.0**-9, 2.0**-9)):
        model.set_requires_gradient_sync(micro == 2 or kind == "sync each time")
        (model(torch.full((1, 1), scale, dtype=torch.bfloat16)).float().sum()).backward()
    assert model.weight.grad.full_tensor().flatten().tolist() == [1.0 + 2.0**-8] * 4
    assert model.weight.grad.dtype == torch.float32
    # One without a gradient of its own in the last pass.
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 1)).float().sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.full((1, 1), 2.0)).float().sum().backward()
    assert model.weight.grad.full_tensor().flatten().tolist() == [2.0] * 4


@on_ranks(2)
def test_no_sync_of_ddp_s_accumulates_and_leaves_settings_as_they_were() -> None:
    model, reference = pair()
    block = model.blocks[1]
    block.set_requires_gradient_sync(False)
    with recorded() as names, model.no_sync():
        models.loss_of(model, own_rows(0)).backward()
    assert names.count(SCATTER) == 0
    with recorded() as names:
        models.loss_of(model, own_rows(1)).backward()
    num_reduced = names.count(SCATTER)
    block.set_requires_gradient_sync(True)
    with recorded() as names:
        models.loss_of(model, own_rows(2)).backward()
    assert names.count(SCATTER) == num_reduced + 1
    for step in range(3):
        models.loss_of(reference, models.batch(step)).backward()
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_gradients_on_their_way_are_cleared_with_the_others() -> None:
    model, reference = pair()
    model.set_is_last_backward(False)
    models.loss_of(model, own_rows(0)).backward()
    model.zero_grad()
    model.set_is_last_backward(True)
    backward_of_both(model, reference, 1)
    assert_same_gradients(model, reference)


@on_ranks(4)
def test_what_waits_for_the_copies_is_reduced_whatever_comes_last() -> None:
    class Choosing(models.TinyModel):
        def forward(self, tokens: torch.Tensor, with_all: bool = True) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks if with_all else self.blocks[:2]:
                x = block(x)
            return self.head(x) if with_all else x @ x.mT

    mesh = disttrain.init_device_mesh("cpu", (2, 2))
    model, reference = pair(Choosing, mesh=mesh)
    for is_last, with_all in ((False, True), (False, False), (True, False)):
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
        model(own_rows(0), with_all).square().mean().backward()
        reference(models.batch(0), with_all).square().mean().backward()
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_gradients_on_the_host_accumulate() -> None:
    model, reference = pair(offload_policy=CPUOffloadPolicy())
    for step in range(3):
        model.set_is_last_backward(step == 2)
        backward_of_both(model, reference, step)
    assert_same_gradients(model, reference)


@on_ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_a_world_of_one_rank_divides_by_nothing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mesh = disttrain.init_device_mesh("cpu", shape)
    for only_sums in (False, True):
        model = nn.Linear(1, 3, bias=False)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype), reshard_after_forward=1)
        model.set_force_sum_reduction_for_comms(only_sums)
        for _ in range(2):
            model(torch.full((1, 1), 3.0)).sum().backward()
        assert model.weight.grad.to_local().flatten().tolist() == [6.0] * 3


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_are_added_to_what_lies_otherwise(dtype: torch.dtype) -> None:
    for placement in (Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")):
        _check_added_to(placement, dtype)


def _check_added_to(placement: Placement, dtype: torch.dtype) -> None:
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(1))
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    fully_shard(model)
    batch = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        given = torch.arange(whole.numel(), dtype=dtype).view_as(whole)
        dim = placement.cut_dim
        laid = Replicate() if dim is not None and dim >= whole.ndim else placement
        grad = distribute_tensor(given, parameter.device_mesh, [Replicate()]).redistribute(placements=[laid])
        for each, value in ((parameter, grad), (whole, given)):
            each.grad_dtype = None
            each.grad = value
    held = [parameter.grad for parameter in model.parameters()]
    for each in (model, plain):
        each(batch).square().sum().backward()
    for parameter, whole, grad in zip(model.parameters(), plain.parameters(), held, strict=True):
        assert parameter.grad is grad
        torch.testing.assert_close(grad.full_tensor(), whole.grad)


@on_ranks(2)
def test_gradients_that_cannot_be_added_to() -> None:
    model = fully_shard(nn.Linear(4, 4))
    mesh = disttrain.init_device_mesh("cpu", (1, 2))
    for spoil, problem in (
        (lambda: setattr(model.weight, "grad", torch.zeros(4, 4)), "is a plain tensor"),
        (lambda: setattr(model.weight, "grad", distribute_tensor(torch.zeros(4, 4), mesh)), "on 1x2"),
        (
            lambda: setattr(
                model.weight.grad, "data", DTensor.from_local(torch.zeros(1, 4), model.weight.device_mesh, [Shard(0)])
            ),
            r"is a DTensor of shape \(2, 4\)",
        ),
    ):
        spoil()
        with pytest.raises(ShardingError, match=f"the gradient of parameter weight.*{problem}.*or to None"):
            model(torch.ones(1, 4)).sum().backward()
        model.weight.grad = None
        model(torch.ones(1, 4)).sum().backward()
        assert model.weight.grad.full_tensor().tolist() == [[1.0] * 4] * 4
