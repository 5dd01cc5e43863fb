"""fully_shard where programs are not simple: casts, copies, failures, odd inputs; judged by a single process."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, distribute_tensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import fully_shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.multirank import models


def sharded(model: nn.Module, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def own_loss(model: nn.Module, step: int) -> torch.Tensor:
    rows = models.own_rows(models.batch(step), disttrain.get_rank(), disttrain.get_world_size())
    return models.loss_of(model, rows)


def assert_same_parameters(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        torch.testing.assert_close(parameter.full_tensor(), expected.pop(name), **tolerance)
    assert not expected


def assert_same_gradients(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q[1].grad, **(tolerance or {"rtol": 1e-6, "atol": 1e-7}))


def step_of_both(model: nn.Module, reference: nn.Module, step: int) -> None:
    own_loss(model, step).backward()
    models.loss_of(reference, models.batch(step)).backward()


@on_ranks(2)
def test_a_sharded_model_can_be_cast_at_any_time() -> None:
    reference = models.TinyModel().init(1).double()
    model = sharded(copy.deepcopy(reference))
    for before in (lambda: None, lambda: own_loss(model, 0), lambda: step_of_both(model, reference, 0)):
        before()
        for one in (model, reference):
            one.zero_grad()
            one.to(torch.float32 if next(one.parameters()).dtype == torch.float64 else torch.float64)
        step_of_both(model, reference, 1)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert {p.dtype, p.to_local().dtype, p.grad.dtype, p.grad.to_local().dtype} == {q.dtype}
        assert_same_gradients(model, reference, rtol=1e-4, atol=1e-5)
    model.blocks[0].norm.half()
    with pytest.raises(ShardingError, match="have become of different dtypes"):
        own_loss(model, 1)


@on_ranks(2)
def test_a_copy_of_a_sharded_model_is_a_model_of_its_own() -> None:
    reference = models.TinyModel().init(1).double()
    model = sharded(copy.deepcopy(reference))
    for before in (lambda: None, lambda: own_loss(model, 0), lambda: own_loss(model, 0).backward()):
        before()
        model.zero_grad()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0.5)
        expected = copy.deepcopy(reference)
        assert_same_parameters(model, expected)
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter.mul_(0.5)
        step_of_both(twin, expected, 1)
        assert_same_gradients(twin, expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        own_loss(twin, 0)
        assert all(isinstance(value, DTensor) for value in twin.state_dict().values())


@on_ranks(2)
def test_a_parameter_shared_beyond_its_group_is_refused() -> None:
    model = models.TinyModel()
    fully_shard(model.embedding)
    with pytest.raises(ShardingError, match=r"parameter head\.weight is shared .* as its weight"):
        fully_shard(model)
    assert not isinstance(model.blocks[0].up.weight, DTensor)


@on_ranks(2)
def test_inference_mode_leaves_the_model_trainable() -> None:
    reference = models.TinyModel().init(1).double()
    with torch.device("meta"):
        model = models.TinyModel().double()
    sharded(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(2):
        with torch.inference_mode():
            model(models.batch(step))
        step_of_both(model, reference, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


@dataclasses.dataclass
class Hidden:
    x: torch.Tensor
    depth: int = 0


class HiddenDict(OrderedDict):
    """As some libraries return: a dict with attributes."""

    @property
    def x(self) -> torch.Tensor:
        return self["x"]


class Opaque:
    """Holds tensors where nobody looks."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@on_ranks(2)
@pytest.mark.parametrize("kind", ["dataclass", "dict", "opaque"])
def test_inputs_and_outputs_of_any_kind(kind: str) -> None:
    make = {"dataclass": Hidden, "dict": lambda x: HiddenDict(x=x), "opaque": Opaque}[kind]

    class Block(models.Block):
        def forward(self, hidden: Hidden, seen: list[int]) -> Hidden:
            seen.append(1)
            assert type(hidden) is type(make(hidden.x))
            return make(super().forward(hidden.x))

    class Model(models.TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden, seen = make(self.embedding(tokens)), []
            for block in self.blocks:
                hidden = block(hidden, seen)
            assert len(seen) == len(self.blocks)
            return self.head(hidden.x)

    reference = Model()
    reference.blocks = nn.ModuleList(Block(7, 13) for _ in range(3))
    reference.init(1).double()
    model = sharded(copy.deepcopy(reference))
    for step in range(2):
        step_of_both(model, reference, step)
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_a_module_may_return_a_part_of_its_parameter() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, 7))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, self.scale[1]

    class Model(models.TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x, scale = self.blocks[0](self.embedding(tokens))
            return self.head(x * scale)

    reference = Model()
    reference.blocks = nn.ModuleList([Scale()])
    reference.init(1).double()
    model = sharded(copy.deepcopy(reference))
    step_of_both(model, reference, 0)
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_blocks_run_without_their_root() -> None:
    reference = models.TinyModel().init(1).double()
    model = sharded(copy.deepcopy(reference), reshard_after_forward=False)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).double()
    own = x.chunk(2)[disttrain.get_rank()]
    for step in range(3):
        step_of_both(model, reference, step)
        # A forward without a backward leaves the block gathered.
        model.blocks[1](own)
        shards = [parameter for parameter in model.state_dict().values() if isinstance(parameter, DTensor)]
        model.blocks[1](own)
        with torch.no_grad():
            for parameter in (*shards, *reference.state_dict().values()):
                parameter.mul_(0.5)
        model.blocks[1](own).pow(2).mean().backward()
        reference.blocks[1](x).pow(2).mean().backward()
        assert_same_gradients(model, reference)


@on_ranks(2)
def test_what_is_gathered_is_what_is_registered() -> None:
    with torch.device("meta"):
        model = models.TinyModel()
    sharded(model).to_empty(device="cpu")
    model.init(2)
    block = model.blocks[0]
    block.unshard()
    expected = models.TinyModel().init(2).blocks[0].up.weight
    assert block.up.weight.shape == expected.shape
    shard = block.state_dict()["up.weight"]
    block.unshard()
    assert torch.equal(block.up.weight, shard.full_tensor())
    # Loading by assignment while the module is kept gathered.
    other = sharded(models.TinyModel().init(3))
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(own_loss(model, 0), own_loss(other, 0))


@on_ranks(2)
def test_a_failed_backward_leaves_nothing_to_the_next_one() -> None:
    reference = models.TinyModel().init(1).double()
    model = sharded(copy.deepcopy(reference))
    good = own_loss(model, 1)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("bad gradient")

    handle = model.blocks[1].down.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    bad = own_loss(model, 0)
    handle.remove()
    with pytest.raises(ValueError, match="bad gradient"):
        bad.backward()
    model.zero_grad()
    good.backward()
    models.loss_of(reference, models.batch(1)).backward()
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_gradients_of_gradients_are_refused() -> None:
    model = sharded(models.TinyModel().init(1))
    x = torch.randn(2, 7, requires_grad=True)
    with pytest.raises(ShardingError, match="create_graph=True"):
        torch.autograd.grad(model.blocks[0](x).sum(), x, create_graph=True)


@on_ranks(2)
def test_an_empty_parameter_is_no_obstacle() -> None:
    reference = models.TinyModel().init(1).double()
    reference.blocks[0].nothing = nn.Parameter(torch.zeros(0, 3).double())
    model = sharded(copy.deepcopy(reference))
    step_of_both(model, reference, 0)
    assert_same_gradients(model, reference)
