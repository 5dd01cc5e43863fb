"""Linear layers in float8 over ranks: weights gathered in float8, layers cut by tensor parallel, and both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.compiling import compile_blocks
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.fsdp2.params.extensions import ExtensionGroup
from disttrain.fsdp2.params.param_group import ParamGroup
from disttrain.fsdp2.state import state_of
from disttrain.kernels import Float8Weight, use_float8
from disttrain.kernels.float8 import reference as float8_reference
from disttrain.kernels.float8 import shards_reference, use
from disttrain.kernels.float8.gain import Gain
from disttrain.kernels.float8.weight import Float8Gather
from disttrain.process_group import Call
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, WIDTH = 16, 48


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, width, bias=False), nn.Linear(DIM, width)
        self.down = nn.Linear(width, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(2)), nn.Linear(DIM, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gathered:
    """The bytes that gathers sent, by dtype."""

    def __init__(self) -> None:
        self.num_bytes: dict[torch.dtype, int] = {}

    def enqueued(self, call: Call) -> None:
        if "all_gather" in call.operation:
            for tensor in call.inputs:
                self.num_bytes[tensor.dtype] = self.num_bytes.get(tensor.dtype, 0) + tensor.nbytes

    def completed(self, call: Call, error: Exception | None) -> None:
        """Only the beginning is recorded."""


def quietly(model: nn.Module, recipe: str) -> nn.Module:
    use_float8(model, recipe, report=lambda _: None)
    return model


def assert_near(found: torch.Tensor, wished: torch.Tensor, tolerance: float) -> None:
    assert (found - wished).norm() <= tolerance * wished.norm()


RECIPES = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])


@on_ranks(1, 2, 3)
@RECIPES
def test_a_sharded_model_trains_as_a_whole_one(recipe: str) -> None:
    check_sharded(recipe, is_compiled=False)


@on_ranks(2)
def test_a_compiled_sharded_model_trains_as_a_whole_one() -> None:
    check_sharded("tensorwise", is_compiled=True)


def check_sharded(recipe: str, *, is_compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    whole = quietly(Model(), recipe)
    model = copy.deepcopy(whole)
    names = list(model.state_dict())
    if is_compiled:
        compile_blocks(model, backend="aot_eager")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert list(model.state_dict()) == names
    assert all(type(one.to_local()) is torch.Tensor for one in model.state_dict().values())
    num_ranks, rank = disttrain.get_world_size(), disttrain.get_rank()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, whole)]
    for step in range(3):
        # With a gradient of its own, so that all blocks are called alike and one graph serves them.
        x = torch.randn(4 * num_ranks, 4, DIM, generator=torch.Generator().manual_seed(step)).requires_grad_()
        # Each rank's inputs and gradients have scales of their own, so the mean of all is the measure.
        model(x.chunk(num_ranks)[rank]).square().mean().backward()
        for part in x.chunk(num_ranks):
            whole(part).square().mean().backward()
        for parameter in whole.parameters():
            parameter.grad /= num_ranks
        for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(one, DTensor), name
            assert_near(one.grad.full_tensor(), other.grad, 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("is_by_values", [False, True])
def test_inference_is_the_forward_of_training(is_by_values: bool) -> None:
    """Also where layers multiply by the values of what was gathered."""
    torch.manual_seed(0)
    model = quietly(Model(), "tensorwise")
    for block in model.blocks:
        if is_by_values:
            block.up.__class__ = nn.Linear
            block.up.fsdp_gather_hooks = block.gate.fsdp_gather_hooks
        fully_shard(block)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
    wished = model(x).detach()
    for without_grad in (torch.no_grad, torch.inference_mode):
        with without_grad():
            assert torch.equal(model(x), wished)
    model(x).square().mean().backward()
    assert model.blocks[0].up.weight.grad.full_tensor().norm() > 0.0


@on_ranks(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor loads
def test_inductor_takes_gathered_weights() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = quietly(nn.Sequential(nn.Linear(DIM, WIDTH)), "tensorwise")
    x = torch.randn(4, 4, DIM)
    wished = model(x)
    fully_shard(model)
    model.compile(fullgraph=True)
    found = model(x)
    torch.testing.assert_close(found, wished, atol=1e-5, rtol=1e-4)
    found.square().mean().backward()
    assert model[0].weight.grad.full_tensor().norm() > 0.0


@on_ranks(2)
def test_weights_travel_in_half_the_bytes() -> None:
    model = quietly(Model(), "tensorwise")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    world, gathered = disttrain.current_world(), Gathered()
    world.add_observer(gathered)
    x = torch.ones(2, DIM)
    model.blocks[0].unshard()
    assert isinstance(model.blocks[0].gate.weight, Float8Weight)
    model.blocks[0].reshard()
    loss = model(x).float().sum()
    world.remove_observer(gathered)
    loss.backward()
    assert model.blocks[0].up.bias.grad.full_tensor().isfinite().all()
    # The first block was gathered twice, once before; the scales of three shards fill up to 16 bytes.
    assert gathered.num_bytes[torch.uint8] == 3 * (3 * DIM * WIDTH // 2 + 16)


@on_ranks(2)
def test_ranks_agree_which_layers_are_faster() -> None:
    """Though each has measured something else."""
    sign = 1 if disttrain.get_rank() else -1

    def measured(rows: int, columns: int, has_bias: bool, num_tokens: int, *rest: object) -> Gain:
        return Gain(rows, columns, num_tokens, 2.0, 2.0 + sign * (0.5 if rows == DIM else -0.5), 0.0)

    model = Model()
    with patch.object(use, "measured", measured), patch.object(use, "_device", lambda _: torch.device("cuda", 0)):
        names = [one.name for one in use_float8(model, report=lambda _: None)]
    choices = [None] * 2
    disttrain.all_gather_object(choices, names)
    assert choices[0] == choices[1]


@on_ranks(2, 3)
@RECIPES
def test_weights_are_cast_once_a_step(recipe: str) -> None:
    """A block's at once, and for backward only where they have been written to since forward."""
    torch.manual_seed(0)
    model = quietly(Model(), recipe)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    rank = disttrain.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(rank))

    def casts_of_step(between: Callable[[], object] = lambda: None) -> tuple[int, int]:
        with patch.object(shards_reference, "cast_shards", wraps=shards_reference.cast_shards) as casts:
            loss = model(x).square().mean()
            in_forward = casts.call_count
            between()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return in_forward, casts.call_count - in_forward

    weight = model.blocks[0].gate.weight
    assert casts_of_step() == (2, 0)
    assert casts_of_step() == (2, 0)
    # What torch counts for the parameter itself, fully_shard refuses.
    assert casts_of_step(lambda: halve(weight)) == (2, 1)
    with patch.object(shards_reference, "cast_shards", wraps=shards_reference.cast_shards) as casts, torch.no_grad():
        model(x)
        model(x)
    assert casts.call_count == 4
    assert all(group._sent is None for block in model.blocks for group in state_of(block).groups if has_codes(group))


@torch.no_grad()
def halve(weight: DTensor) -> None:
    weight.to_local().mul_(0.5)


def has_codes(group: ParamGroup) -> bool:
    return isinstance(group, ExtensionGroup)


@on_ranks(2, 3)
@RECIPES
def test_what_is_cast_at_once_is_what_is_cast_one_by_one(recipe: str) -> None:
    """Also of ranks that have fewer rows, and none."""
    torch.manual_seed(0)
    model = quietly(nn.Sequential(nn.Linear(DIM, 16), nn.Linear(16, 48, bias=False), nn.Linear(48, 64)), recipe)
    other = copy.deepcopy(model)
    found = []
    for one, together in ((model, Float8Gather.fsdp_pre_all_gather_together), (other, None)):
        with patch.object(Float8Gather, "fsdp_pre_all_gather_together", together):
            if together is None:
                del Float8Gather.fsdp_pre_all_gather_together
            fully_shard(one)
            one.unshard()
            found.append([layer.weight for layer in one if isinstance(layer.weight, Float8Weight)])
    assert len(found[0]) == len(found[1]) == 2
    for weight, wished in zip(*found, strict=True):
        assert torch.equal(weight.codes.view(torch.uint8), wished.codes.view(torch.uint8))
        assert torch.equal(weight.scales, wished.scales)


PLAN = {"blocks.*.gate": ColwiseParallel(), "blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


@on_ranks(2, 4)
@RECIPES
def test_cut_layers_and_cut_ones_sharded(recipe: str) -> None:
    check_cut(recipe, is_compiled=False)


@pytest.mark.sweep(0)
@on_ranks(2)
def test_compiled_cut_layers() -> None:
    check_cut("tensorwise", is_compiled=True)


@pytest.mark.sweep(0)
@on_ranks(4)
def test_compiled_cut_layers_sharded() -> None:
    check_cut("rowwise", is_compiled=True)


def check_cut(recipe: str, *, is_compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    whole = Model(width=64)
    model = quietly(copy.deepcopy(whole), recipe)
    num_ranks, rank = disttrain.get_world_size(), disttrain.get_rank()
    mesh = disttrain.init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    if is_compiled:
        compile_blocks(model, backend="aot_eager")
    if num_ranks > 2:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(4, 4, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()
    never = patch.object(Float8Weight, "values", side_effect=AssertionError("multiplied in its values"))
    with never, patch.object(float8_reference, "multiply", wraps=float8_reference.multiply) as multiply:
        found = model(x.chunk(num_ranks // 2)[rank // 2])
        found.square().mean().backward()
    assert multiply.call_count == 3 * 6
    wished = whole(x)
    assert_near(found, wished.chunk(num_ranks // 2)[rank // 2].detach(), 0.06)
    wished.square().mean().backward()
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        assert other.grad is not None, name
        assert_near(grad, other.grad, 0.15)


@on_ranks(2)
def test_parts_that_do_not_fit_are_multiplied_as_they_are() -> None:
    torch.manual_seed(0)
    whole = Model()
    model = quietly(copy.deepcopy(whole), "tensorwise")
    parallelize_module(model, disttrain.init_device_mesh("cpu", (2,)), PLAN)
    x = torch.randn(4, 4, DIM, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match=r"a part of a weight has shape \(24, 16\)"):
        found = model(x)
    torch.testing.assert_close(found, whole(x))
