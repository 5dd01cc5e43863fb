"""round_in_step: an optimizer writes what the next gathers send, and the numbers stay what they were."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import disttrain
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.kernels import AdamW
from disttrain.testing.pytest_plugin import on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NUM_STEPS = 3


def sharded(model: nn.Sequential) -> nn.Sequential:
    for layer in model[:2]:
        fully_shard(layer, mp_policy=BF16)
    return fully_shard(model, mp_policy=BF16)


def trained(model: nn.Sequential, optimizer: AdamW) -> list[torch.Tensor]:
    rank, losses = disttrain.get_rank(), []
    for step in range(NUM_STEPS):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1))


@on_ranks(1, 2, 3)
def test_numbers_stay_what_they_were() -> None:
    """Of parts that are uneven, and empty on some ranks."""
    plain, other = sharded(made()), sharded(made())
    wished = trained(plain, AdamW(plain.parameters(), lr=0.05))
    optimizer = AdamW(other.parameters(), lr=0.05)
    other.round_in_step(optimizer)
    assert torch.equal(torch.stack(trained(other, optimizer)), torch.stack(wished))
    for one, two in zip(other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())


@on_ranks(2)
def test_gathers_send_what_the_step_has_written() -> None:
    model = sharded(made())
    optimizer = AdamW(model.parameters(), lr=0.05)
    model.round_in_step(optimizer)
    trained(model, optimizer)
    (group,) = model[0]._disttrain_shard_state.groups
    assert group.cast_shards is not None
    group.cast_shards.values.fill_(2.0)
    x = torch.ones(1, 7)
    assert torch.equal(model[0](x), torch.full((1, 5), 16.0, dtype=torch.bfloat16))
    model[0].reshard()
    with torch.no_grad():
        model[0].weight.zero_()  # by torch's operators, so the copies are none any more
        model[0].bias.fill_(3.0)
    assert torch.equal(model[0](x), torch.full((1, 5), 3.0, dtype=torch.bfloat16))


def _by_data(parameter: nn.Parameter) -> None:
    parameter.data.fill_(3.0)


def _swapped(parameter: nn.Parameter) -> None:
    parameter.data = torch.full_like(parameter.data, 3.0)


def _in_inference(parameter: nn.Parameter) -> None:
    with torch.inference_mode():
        parameter.fill_(3.0)


def _by_detach(parameter: nn.Parameter) -> None:
    parameter.detach().fill_(3.0)


def _by_local(parameter: Any) -> None:
    with torch.no_grad():
        parameter.to_local().fill_(3.0)


def _by_view(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.view(parameter.shape).fill_(3.0)


def _by_foreach(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_copy_([parameter], [torch.full_like(parameter, 3.0)])


WRITES = [_by_data, _swapped, _in_inference, _by_detach, _by_local, _by_view, _by_foreach]


@on_ranks(2)
def test_copies_are_not_used_after_any_other_write() -> None:
    """As where averages of parameters are swapped in after a step, to evaluate; or a state dict is assigned."""
    for write in WRITES:
        model = sharded(made())
        optimizer = AdamW(model.parameters(), lr=0.05)
        model.round_in_step(optimizer)
        trained(model, optimizer)
        for parameter in model[0].parameters():
            write(parameter)
        with torch.no_grad():
            y = model[0](torch.ones(1, 7))
        assert torch.equal(y, torch.full((1, 5), 24.0, dtype=torch.bfloat16)), write.__name__
    state = {name: torch.full_like(parameter, 3.0) for name, parameter in model[1].state_dict().items()}
    model[1].load_state_dict(state, assign=True)
    with torch.no_grad():
        y = model[1](torch.ones(1, 5))
    assert torch.equal(y, torch.full((1, 3), 18.0, dtype=torch.bfloat16))


@on_ranks(2)
def test_copies_are_of_a_whole_step_and_gone_after_backward() -> None:
    model = sharded(made())
    optimizer = AdamW(model.parameters(), lr=0.05)
    model.round_in_step(optimizer)
    again = copy.deepcopy(model)
    trained(again, AdamW(again.parameters(), lr=0.05))
    states = [module._disttrain_shard_state for module in (model[0], model[1], model)]
    trained(model, optimizer)
    assert all(group.cast_shards is not None for state in states for group in state.groups)
    model(torch.ones(2, 7)).sum().backward()
    assert all(group.cast_shards is None for state in states for group in state.groups)
    model[1].bias.grad = None
    optimizer.step()
    assert [group.cast_shards is None for state in states for group in state.groups] == [False, True, False]
