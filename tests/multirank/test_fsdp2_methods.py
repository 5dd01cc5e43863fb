"""The methods of FSDPModule, and what they change in an iteration."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from disttrain.fsdp2.transfers import forms
from disttrain.process_group import Call
from disttrain.testing.pytest_plugin import on_ranks
from tests.multirank import models

GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


def sharded(model: nn.Module, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def own_rows(step: int) -> torch.Tensor:
    return models.own_rows(models.batch(step), disttrain.get_rank(), disttrain.get_world_size())


class Calls:
    """The collectives that were called, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def enqueued(self, call: Call) -> None:
        self.names.append(call.operation)

    def completed(self, call: Call, error: Exception | None) -> None:
        pass


@contextmanager
def recorded() -> Iterator[list[str]]:
    world, calls = disttrain.current_world(), Calls()
    world.add_observer(calls)
    try:
        yield calls.names
    finally:
        world.remove_observer(calls)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def pair() -> tuple[nn.Module, nn.Module]:
    reference = models.TinyModel().double().init(0)
    return sharded(copy.deepcopy(reference)), reference


@on_ranks(2)
def test_unsharding_ahead_and_in_the_background() -> None:
    model, reference = pair()
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    handle.wait()
    handle.wait()
    assert torch.equal(model.blocks[0].up.weight, reference.blocks[0].up.weight)
    with recorded() as names:
        model(own_rows(0))
    assert names == [GATHER] * 3
    model.blocks[0].reshard()
    assert isinstance(model.blocks[0].up.weight, DTensor)


@on_ranks(2)
def test_methods_besides_forward_compute_with_whole_parameters() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0).view(3, 2))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    plain = Coder()
    register_fsdp_forward_method(plain, "encode")
    coder = fully_shard(copy.deepcopy(plain))
    for name in ("encode", "decode"):
        register_fsdp_forward_method(coder, name)
    x = torch.ones(1, 3)
    result = coder.encode(x)
    assert torch.equal(result, plain.encode(x))
    result.sum().backward()
    assert torch.equal(coder.weight.grad.full_tensor(), torch.ones(3, 2))
    with pytest.raises(ArithmeticError):
        coder.decode(x)
    assert isinstance(coder.weight, DTensor)
    with pytest.raises(ShardingError, match="has no method 'invert'"):
        register_fsdp_forward_method(coder, "invert")


@on_ranks(2)
def test_the_user_chooses_what_is_gathered_ahead() -> None:
    model, reference = pair()
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    for block in model.blocks:
        block.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([second, first])
    for step in range(3):
        with recorded() as names:
            loss = models.loss_of(model, own_rows(step))
            assert names == [GATHER] * 4
            loss.backward()
        # The root is whole already; the last block gathers the other two before its own gradients are reduced.
        assert names[4:8] == [GATHER, GATHER, GATHER, SCATTER]
        models.loss_of(reference, models.batch(step)).backward()
        torch.testing.assert_close(gradients(model), gradients(reference))
    with pytest.raises(ShardingError, match="a Linear is not sharded"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])


@on_ranks(2)
@pytest.mark.parametrize("keeps_whole", [False, True])
def test_accumulating_without_communication(keeps_whole: bool) -> None:
    model, reference = pair()
    with recorded() as names:
        for micro in range(3):
            is_last = micro == 2
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            if keeps_whole:
                model.set_reshard_after_forward(False)
                model.set_reshard_after_backward(is_last)
            models.loss_of(model, own_rows(micro)).backward()
    assert names.count(SCATTER) == 4
    assert names.count(GATHER) == (4 if keeps_whole else 3 * 7)
    for micro in range(3):
        models.loss_of(reference, models.batch(micro)).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(4)
def test_accumulating_within_shards_and_over_copies_once() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2))
    reference = models.TinyModel().double().init(0)
    model = sharded(copy.deepcopy(reference), mesh=mesh)
    with recorded() as names:
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            models.loss_of(model, own_rows(micro)).backward()
            assert names.count(SCATTER) == 4 * (micro + 1)
            assert names.count(REDUCE) == (4 if micro == 2 else 0)
    for micro in range(3):
        models.loss_of(reference, models.batch(micro)).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))


@on_ranks(2)
def test_what_backward_needs_no_parameter_of_is_not_gathered_for_it() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = fully_shard(nn.Embedding(5, 4))
            self.out = nn.Linear(4, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embedding(tokens))

    model = fully_shard(Table())
    model.embedding.set_unshard_in_backward(False)
    tokens = torch.tensor([0, 3, 3])
    for _ in range(2):
        with recorded() as names:
            model(tokens).sum().backward()
        assert names == [GATHER] * 2 + [SCATTER] * 2
    assert model.embedding.weight.grad.full_tensor().count_nonzero() == 2 * 4


@on_ranks(2)
def test_gradients_are_divided_as_asked() -> None:
    model, reference = pair()
    models.loss_of(reference, models.batch(0)).backward()
    expected = gradients(reference)
    for block in model.blocks:
        block.set_reduce_scatter_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)
    model.set_force_sum_reduction_for_comms(True)
    models.loss_of(model, own_rows(0)).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name] * (2.0 if name.startswith("blocks") else 1.0))


@on_ranks(2)
def test_a_hook_changes_reduced_gradients() -> None:
    model, reference = pair()
    shapes: list[tuple[int, ...]] = []

    def double(flat: torch.Tensor) -> None:
        shapes.append(tuple(flat.shape))
        flat.mul_(2)

    model.set_all_reduce_hook(double)
    models.loss_of(model, own_rows(0)).backward()
    models.loss_of(reference, models.batch(0)).backward()
    assert len(shapes) == 4
    torch.testing.assert_close(gradients(model), {name: 2 * grad for name, grad in gradients(reference).items()})


@on_ranks(2)
def test_a_rank_without_gradients_takes_part_on_request() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)))
    model.set_reduce_scatter_unused_params(True)
    out = model(torch.ones(1, 2))
    # Rank 1's loss depends on none of the parameters, but its backward passes through the module.
    (out.sum() if disttrain.get_rank() == 0 else out.sum() * 0).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None


@on_ranks(2)
def test_roots_share_streams() -> None:
    first, second = fully_shard(nn.Linear(2, 2)), fully_shard(nn.Linear(2, 2))
    share_comm_ctx([first, second])
    second(first(torch.ones(1, 2))).sum().backward()
    states = [module.__dict__["_disttrain_shard_state"] for module in (first, second)]
    assert states[0].context is not states[1].context
    assert states[0].context.comm is states[1].context.comm
    assert all(parameter.grad is not None for module in (first, second) for parameter in module.parameters())


@on_ranks(2)
def test_an_iteration_that_failed_can_be_forgotten() -> None:
    model, reference = pair()
    loss = models.loss_of(model, own_rows(0))
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(own_rows(0))
    handle.remove()
    model.reset_iter_state()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with pytest.raises(ShardingError, match="no root that has run"):
        model.blocks[0].reset_iter_state()
    del loss
    models.loss_of(model, own_rows(0)).backward()
    models.loss_of(reference, models.batch(0)).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))


@on_ranks(2)
def test_parameters_of_several_dtypes_in_one_module() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
            self.high = nn.Linear(3, 3, bias=False)
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.high(self.low(x.to(self.low.weight.dtype)).to(self.high.weight.dtype)) * self.scale).sum()

    plain = Mixed()
    for policy in (
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(torch.float32, torch.float64, cast_forward_inputs=False),
    ):
        model = fully_shard(copy.deepcopy(plain), mp_policy=policy)
        model(torch.ones(2, 3)).backward()
        assert [parameter.grad.dtype for parameter in model.parameters()] == [
            parameter.dtype for parameter in plain.parameters()
        ]
        plain.zero_grad()
        plain(torch.ones(2, 3)).backward()
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=2e-2, atol=2e-2)


@on_ranks(2)
def test_a_roots_gradients_are_reduced_as_soon_as_they_are_there() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7)).double()
    usual = forms.PART_BYTES
    forms.PART_BYTES = 128
    try:
        model = copy.deepcopy(plain)
        fully_shard(model[1])
        fully_shard(model)
        tokens = torch.arange(8).remainder(7).view(2, 4)
        for micro in range(4):
            model.set_requires_gradient_sync(micro != 1)
            with recorded() as names:
                model(tokens[disttrain.get_rank()]).square().mean().backward()
            # The head's, the block's, then those of norm and embedding.
            assert names.count(SCATTER) == (0 if micro == 1 else 3)
            assert names[-1] == (GATHER if micro == 1 else SCATTER)
            plain(tokens).square().mean().backward()
            if micro != 1:
                torch.testing.assert_close(gradients(model), gradients(plain))
        model[3].weight.requires_grad_(False)
        model.zero_grad()
        plain.zero_grad()
        model(tokens[disttrain.get_rank()]).square().mean().backward()
        plain[3].weight.requires_grad_(False)
        plain(tokens).square().mean().backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
    finally:
        forms.PART_BYTES = usual


@on_ranks(2)
def test_several_modules_are_one_group() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7)).double()
    model = copy.deepcopy(plain)
    listed = [model[2], model[3]]
    assert fully_shard(listed) is listed
    fully_shard(model[1])
    fully_shard(model)
    assert isinstance(model[2], FSDPModule)
    assert isinstance(model[3], FSDPModule)
    tokens = torch.arange(8).remainder(7).view(2, 4)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, plain)]
    for _ in range(3):
        with recorded() as names:
            model(tokens[disttrain.get_rank()]).square().mean().backward()
        # The root stays whole; the linear and the two at the end are gathered once before forward and before backward.
        assert names.count(GATHER) == 5
        assert names.count(SCATTER) == 3
        plain(tokens).square().mean().backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model(tokens[disttrain.get_rank()])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), plain(tokens))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with pytest.raises(ShardingError, match="the list of modules is empty"):
        fully_shard([])
