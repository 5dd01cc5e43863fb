"""What fully_shard cannot take, each with one clear error and a way out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.fsdp2 import assert_same_gradients, backward_of_both, own_rows, sharded
from tests.multirank import models


@on_ranks(2)
def test_arguments_of_other_kinds() -> None:
    class Callable(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)

    linear = nn.Linear(2, 2)
    mistakes = [
        ("a ModuleList has no forward of its own.*Shard each of its modules", nn.ModuleList([linear]), {}),
        ("a ParameterList has no forward of its own", nn.ParameterList([linear.weight]), {}),
        ("a list is no module", [[linear]], {}),
        ("parameter weight has no shape yet.*before fully_shard", nn.LazyLinear(2), {}),
        ("the mesh is a .*object.*disttrain.init_device_mesh", linear, {"mesh": object()}),
        (
            "MixedPrecisionPolicy is no MixedPrecisionPolicy of disttrain.*from disttrain.fsdp2",
            linear,
            {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy()},
        ),
        (
            "CPUOffloadPolicy is no OffloadPolicy of disttrain",
            linear,
            {"offload_policy": torch.distributed.fsdp.CPUOffloadPolicy()},
        ),
    ]
    for rule, module, options in mistakes:
        with pytest.raises(ShardingError, match=f"(?s){rule}"):
            fully_shard(module, **options)
    assert type(linear) is nn.Linear
    own = fully_shard(Callable([linear]))
    assert own(torch.ones(1, 2)).shape == (1, 2)


@on_ranks(2)
def test_a_mesh_of_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        return
    with pytest.raises(ShardingError, match="the mesh is one of 'cuda', and this rank computes on 'cpu'"):
        fully_shard(nn.Linear(2, 2), mesh=disttrain.init_device_mesh("cuda", (2,)))


@on_ranks(2)
def test_running_on_the_meta_device() -> None:
    reference = models.TinyModel().double().init(3)
    with torch.device("meta"):
        model = models.TinyModel().double()
    sharded(model)
    for _ in range(2):
        with pytest.raises(ShardingError, match=r"(?s)is on meta.*to_empty\(device='cpu'\)"):
            models.loss_of(model, own_rows(0))
        with pytest.raises(ShardingError, match="is on meta"):
            model.blocks[1].unshard()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.to_empty(device="cpu")
    for part in (model.blocks[0].up, model.blocks[0].down):
        part.to("meta")
        with pytest.raises(ShardingError, match="is on meta"):
            model.blocks[0].unshard()
        part.to_empty(device="cpu")
    model.init(3)
    backward_of_both(model, reference, 0)
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_an_optimizer_built_before_sharding() -> None:
    model = models.TinyModel().double().init(0)
    reference = copy.deepcopy(model)
    stale = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded(model)
    stale.zero_grad()
    models.loss_of(model, own_rows(0)).backward()
    with pytest.raises(ShardingError, match=r"(?s)SGD.step.*built before fully_shard: 16 of its.*after the last call"):
        stale.step()
    models.loss_of(reference, models.batch(0)).backward()
    assert_same_gradients(model, reference)
    # It may be mended, or left lying.
    stale.param_groups[0]["params"] = list(model.parameters())
    stale.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


@on_ranks(2)
def test_what_sharding_replaced_may_still_be_trained_by_itself() -> None:
    model = models.TinyModel().double().init(0)
    held = dict(model.named_parameters())
    plain = models.TinyModel().double()
    own = torch.optim.SGD(held.values(), lr=0.1)
    sharded(model)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    before = held["embedding.weight"].detach().clone()
    for step in range(2):
        models.loss_of(model, own_rows(step)).backward()
        logits = torch.func.functional_call(plain, held, models.batch(step))
        logits.square().mean().backward()
        for optimizer in (theirs, own):
            optimizer.step()
            optimizer.zero_grad()
    # A step without any gradients is no mistake, either.
    own.step()
    assert not torch.equal(held["embedding.weight"], before)


@on_ranks(2)
def test_what_is_no_floating_point_number_keeps_its_dtype() -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(-3, 3, dtype=torch.int8).view(3, 2), requires_grad=False)
            self.phase = nn.Parameter(torch.full((2,), 1 + 2j))
            self.scale = nn.Parameter(torch.full((3, 1), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert (self.codes.dtype, self.phase.dtype, self.scale.dtype) == (
                torch.int8,
                torch.complex64,
                torch.bfloat16,
            )
            return torch.view_as_real(self.phase * x @ (self.codes * self.scale).T.to(self.phase.dtype)).sum()

    plain = Quantized()
    model = fully_shard(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model(torch.ones(1, 2)).backward()
    plain.scale.data = plain.scale.data.bfloat16()
    plain(torch.ones(1, 2)).backward()
    assert torch.equal(model.phase.grad.full_tensor(), plain.phase.grad)
    assert torch.equal(model.scale.grad.full_tensor(), plain.scale.grad.float())
    assert model.codes.grad is None
    assert torch.equal(model.codes.full_tensor(), plain.codes)
