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
from tests.tp_cases import Decoder, decoder_plan


def compiled(model: Decoder) -> None:
    compile_blocks(model, backend="aot_eager")


def sharded(model: Decoder) -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def cut(model: Decoder) -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    tp.parallelize_module(model, mesh, decoder_plan(2, sequence=True))


def wrapped(model: Decoder) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)


STEPS = {step.__name__: step for step in (compiled, sharded, cut, wrapped)}
# What is sharded can neither be cut nor wrapped afterwards.
ORDERS = [
    " ".join([*parts[:place], "compiled", *parts[place:]])
    for parts in (["sharded"], ["cut"], ["cut", "sharded"], ["wrapped", "sharded"])
    for place in range(len(parts) + 1)
]


def check(model: Decoder, reference: Decoder, num_parts: int) -> None:
    """Gradients of two steps; each of `num_parts` takes rows of its own, and their gradients are averaged."""
    rows = torch.arange(4 * 8).reshape(4, 8) % 16
    own = rows.chunk(num_parts)[disttrain.get_rank() // 2 % num_parts]
    for _ in range(2):
        model(own).sin().mean().backward()
        reference(rows).sin().mean().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        grad = parameter.grad
        torch.testing.assert_close(grad.full_tensor() if isinstance(grad, DTensor) else grad, expected.grad)


@pytest.mark.timeout(110)
@pytest.mark.parametrize("order", ORDERS)
@on_ranks(4, timeout_s=100)
def test_any_order(order: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    reference = Decoder(num_blocks=3).double()
    model = copy.deepcopy(reference)
    for name in order.split():
        STEPS[name](model)
    check(model, reference, num_parts=2 if "sharded" in order else 1)
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


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
