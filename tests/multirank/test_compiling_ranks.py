"""compile_blocks together with sharding, cutting and checkpointing, in every order: the values of a single process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import disttrain
from disttrain import tp
from disttrain.compiling import compile_blocks
from disttrain.dtensor import DTensor
from disttrain.errors import CompileError
from disttrain.fsdp2 import fully_shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.tensor_parallel import Decoder, Feeding, decoder_plan


def compiled(model: Decoder) -> None:
    compile_blocks(model, backend="aot_eager")


def mesh() -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", (2, disttrain.get_world_size() // 2), mesh_dim_names=("dp", "tp"))


def sharded(model: Decoder) -> None:
    data_ranks = mesh()["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=data_ranks)
    fully_shard(model, mesh=data_ranks)


def cut(model: Decoder) -> None:
    plan = {name: style for name, style in decoder_plan(2, sequence=True).items() if ".attention" not in name}
    tp.parallelize_module(model, mesh()["tp"], plan)


def wrapped(model: Decoder) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)


STEPS = {step.__name__: step for step in (compiled, sharded, cut, wrapped)}


def orders(*steps: str) -> list[str]:
    """Compiling comes before, between or after; what is sharded can neither be cut nor wrapped afterwards."""
    return [" ".join([*steps[:place], "compiled", *steps[place:]]) for place in range(len(steps) + 1)]


def check(order: str, reference: Decoder) -> None:
    """Gradients of two steps; each half takes rows of its own, and their gradients are averaged."""
    torch._dynamo.reset()
    counters.clear()
    model = copy.deepcopy(reference)
    for name in order.split():
        STEPS[name](model)
    rows = torch.arange(4 * 8).reshape(4, 8) % 16
    own = rows.chunk(2)[mesh()["dp"].get_local_rank()]
    for _ in range(2):
        model(own).sin().mean().backward()
        reference(rows).sin().mean().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        grad = parameter.grad
        torch.testing.assert_close(grad.full_tensor() if isinstance(grad, DTensor) else grad, expected.grad)
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


@pytest.mark.sweep(0)
@pytest.mark.parametrize("order", orders("cut", "sharded"))
@on_ranks(4, timeout_s=360)
def test_cut_and_sharded_in_any_order(order: str) -> None:
    torch.manual_seed(0)
    check(order, Decoder(num_blocks=3, block=Feeding).double())


@pytest.mark.parametrize("order", orders("wrapped", "sharded"))
@on_ranks(2, timeout_s=360)
def test_wrapped_and_sharded_in_any_order(order: str) -> None:
    torch.manual_seed(0)
    check(order, Decoder(num_blocks=3, block=Feeding).double())


@on_ranks(2)
def test_parts_that_are_gathered_within_a_block_are_refused() -> None:
    model = Decoder()
    for block in model.blocks:
        fully_shard(block.mlp)
    with pytest.raises(
        CompileError, match=r"called on blocks\.0\.mlp, which is within the block 'blocks\.0'\. Shard whole"
    ):
        compile_blocks(model)
    assert [kind.name for kind in compile_blocks(model, "blocks.*.mlp").kinds] == ["FSDPGatedMLP"]


@on_ranks(2)
def test_parts_that_are_gathered_later_are_refused_at_the_first_call() -> None:
    model = Decoder()
    compiled(model)
    for block in model.blocks:
        fully_shard(block.mlp)
    with pytest.raises(CompileError, match=r"called on Block\.mlp, which is within the block 'Block'\. Shard whole"):
        model(torch.zeros(1, 4, dtype=torch.int64))


@on_ranks(2)
def test_a_wrapper_around_a_sharded_block_is_refused() -> None:
    model = Decoder()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(fully_shard(block))
    with pytest.raises(CompileError, match=r"Wrap blocks for checkpointing first and shard what comes of it"):
        compile_blocks(model)


@on_ranks(2)
def test_blocks_of_a_list_that_is_no_model() -> None:
    blocks = nn.ModuleList(Decoder().blocks)
    assert len(compile_blocks(blocks, backend="aot_eager").kinds) == 1


@on_ranks(2)
@pytest.mark.parametrize("what", ["model", "block", "forward of a part"])
def test_what_is_compiled_with_its_hooks_has_graphs_between_them(what: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))).double()
    model = copy.deepcopy(reference)
    for block in model:
        fully_shard(block[0] if what == "forward of a part" else block)
    fully_shard(model)
    compiled_model = model
    if what == "model":
        compiled_model = torch.compile(model, backend="aot_eager")
    else:
        model[1] = torch.compile(model[1], backend="aot_eager") if what == "block" else model[1]
        model[1].forward = torch.compile(model[1].forward, backend="aot_eager")
    x = torch.randn(4, 4, dtype=torch.float64)
    rank = disttrain.get_rank()
    optimizers = [torch.optim.SGD(one.parameters(), 0.5) for one in (model, reference)]
    for _ in range(3):
        compiled_model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        reference(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
