"""Cut modules under torch.compile: one graph, the values and gradients of a single process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.compiling import compile_blocks
from disttrain.dtensor import Replicate, Shard
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from tests.cases.tensor_parallel import (
    Attention,
    Decoder,
    Feeding,
    GatedMLP,
    block_plan,
    check_gradients,
    decoder_plan,
    feeding_plan,
    gathered,
    scattered,
)


class Attending(nn.Module):
    """The half of a decoder's block that has heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads=4, num_kv_heads=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.attention_norm(x))


@pytest.mark.sweep(0)
@pytest.mark.parametrize(
    ("half", "backend", "sequence", "overlap"),
    [
        ("attention", "aot_eager", True, None),
        ("mlp", "aot_eager", False, None),
        ("mlp", "inductor", True, True),
    ],
)
# Two graphs with a cold cache take 70 s where two tests share two cores.
@on_ranks(2, timeout_s=360)
def test_half_a_compiled_block(half: str, backend: str, sequence: bool, overlap: bool | None) -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = (Attending(8) if half == "attention" else Feeding(8)).double()
    plan = {path: style for path, style in block_plan(2, sequence=sequence).items() if path.startswith(half)}
    for style in plan.values():
        if hasattr(style, "overlap"):
            style.overlap = overlap
    module = parallelize_module(copy.deepcopy(alone), mesh, plan)
    # What is dear has symbols for sizes at once: attention takes seconds to trace, a kernel one to compile.
    # 8 would be the width.
    is_dear = half == "attention" or backend == "inductor"
    sizes, is_dynamic, num_graphs = ((12, 16), True, 1) if is_dear else ((8, 12, 16), None, 2)
    module.compile(fullgraph=True, backend=backend, dynamic=is_dynamic)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for size in sizes:
        x = torch.randn(2, size, 8, dtype=torch.float64)
        expected = alone(x)
        result = module(scattered(1)(x, mesh) if sequence else x)
        result = gathered(1)(result, mesh) if sequence else result
        torch.testing.assert_close(result, expected)
        expected.sin().sum().backward()
        result.sin().sum().backward()
        check_gradients(module, alone)
    # Else the second size makes torch take sizes for symbols; the third is nothing new.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs, torch._dynamo.utils.counters["stats"]


@on_ranks(2, timeout_s=360)
def test_a_compiled_module_that_gathers_its_input() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = GatedMLP().double()
    plan = {
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    module = parallelize_module(copy.deepcopy(alone), mesh, plan)
    torch._dynamo.reset()
    module.compile(fullgraph=True, backend="aot_eager")
    # One position on each rank.
    x = torch.randn(2, 2, 6, dtype=torch.float64)
    result = gathered(1)(module(scattered(1)(x, mesh)), mesh)
    torch.testing.assert_close(result, alone(x))
    result.sin().sum().backward()
    alone(x).sin().sum().backward()
    check_gradients(module, alone)


@on_ranks(2, timeout_s=360)
def test_blocks_that_are_compiled_one_by_one_share_a_graph() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = nn.Sequential(*(Feeding() for _ in range(3))).double()
    model = parallelize_module(copy.deepcopy(alone), mesh, feeding_plan(sequence=True, prefix="*."))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model:
        block.compile(fullgraph=True, backend="aot_eager")
    # As an embedding gives it; else the first block's graph would be one without the gradient of its input.
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    expected, result = alone(x), gathered(1)(model(scattered(1)(x, mesh)), mesh)
    torch.testing.assert_close(result, expected)
    expected.sin().sum().backward()
    result.sin().sum().backward()
    check_gradients(model, alone)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, torch._dynamo.utils.counters["stats"]


@pytest.mark.sweep(1)
@on_ranks(2, timeout_s=360)
@pytest.mark.parametrize("how", ["the sequence in place", "its first child"])
def test_a_compiled_sequence_whose_first_child_gathers_its_input(how: str) -> None:
    """Dynamo passes over the frames of torch's modules, so that the child's hook begins a graph."""
    mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = nn.Sequential(GatedMLP(), nn.Tanh()).double()
    plan = {
        "0": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "0.gate": ColwiseParallel(),
        "0.up": ColwiseParallel(),
        "0.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    module = parallelize_module(copy.deepcopy(alone), mesh, plan)
    torch._dynamo.reset()
    if how == "its first child":
        run = nn.Sequential(torch.compile(module[0], backend="aot_eager"), module[1])
    else:
        module.compile(backend="aot_eager")
        run = module
    for _ in range(2):
        x = torch.randn(2, 2, 6, dtype=torch.float64)
        expected, result = alone(x), gathered(1)(run(scattered(1)(x, mesh)), mesh)
        torch.testing.assert_close(result, expected)
        expected.sin().sum().backward()
        result.sin().sum().backward()
        check_gradients(module, alone)


# Four ranks trace on two cores.
@pytest.mark.sweep(0)
@on_ranks(4, timeout_s=360)
def test_steps_of_compiled_blocks_whose_ranks_share_heads() -> None:
    mesh = disttrain.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = Decoder(block=Attending).double()
    plan = {path: style for path, style in decoder_plan(2, sequence=True).items() if "mlp" not in path}
    plan["head"] = ColwiseParallel(input_layouts=Shard(1))
    model = parallelize_module(copy.deepcopy(alone), mesh, plan)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(model, backend="aot_eager")
    for _ in range(2):
        tokens, targets = torch.randint(16, (2, 2, 8))
        expected = F.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten())
        loss = vocab_parallel_cross_entropy(model(tokens), targets, mesh, vocab_size=16)
        torch.testing.assert_close(loss, expected)
        expected.backward()
        loss.backward()
        check_gradients(model, alone)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, torch._dynamo.utils.counters["stats"]


@on_ranks(3, timeout_s=360)
def test_a_compiled_block_whose_parts_differ() -> None:
    mesh = disttrain.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    # Of 10 columns the last rank has two.
    alone = Feeding().double()
    plan = feeding_plan(sequence=True)
    module = parallelize_module(copy.deepcopy(alone), mesh, plan)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module.compile(fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(2, 9, 6, dtype=torch.float64)
        expected = alone(x)
        result = gathered(1)(module(scattered(1)(x, mesh)), mesh)
        torch.testing.assert_close(result, expected)
        expected.sin().sum().backward()
        result.sin().sum().backward()
        check_gradients(module, alone)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, torch._dynamo.utils.counters["stats"]
