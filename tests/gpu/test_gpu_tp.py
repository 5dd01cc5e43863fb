"""Cut modules on GPUs, with communication under the multiplications and without, judged by one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import disttrain
from disttrain.dtensor import DTensor
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import parallelize_module
from tests.cases.tensor_parallel import Block, block_plan, gathered, scattered
from tests.gpu.ranks import NUM_GPU_RANKS

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("overlap", [False, True, None])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(NUM_GPU_RANKS)
def test_a_block_on_parts_of_the_sequence(overlap: bool | None, batch: int, dtype: torch.dtype) -> None:
    check_block(overlap, batch, dtype)


@pytest.mark.timeout(200)
@on_ranks(NUM_GPU_RANKS, timeout_s=180)
def test_a_compiled_block() -> None:
    torch._dynamo.reset()
    counters.clear()
    check_block(None, 1, torch.bfloat16, is_compiled=True)
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


def check_block(overlap: bool | None, batch: int, dtype: torch.dtype, *, is_compiled: bool = False) -> None:
    torch.set_float32_matmul_precision("highest")
    mesh = disttrain.init_device_mesh("cuda", (NUM_GPU_RANKS,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    # Heads that ranks can have alike, few and wide: each takes memory by the square of the rows.
    dim = 256 * NUM_GPU_RANKS
    alone = Block(dim, 2 * NUM_GPU_RANKS, NUM_GPU_RANKS, 2 * dim).to(disttrain.current_world().device, dtype)
    plan = block_plan(128, sequence=True)
    for style in plan.values():
        if hasattr(style, "overlap"):
            style.overlap = overlap
    module = parallelize_module(copy.deepcopy(alone), mesh, plan)
    if is_compiled:
        module.compile(fullgraph=True)
    # Plain parts are of one size: some 8 MiB in fp32, 4 MiB in bf16, which decides for the overlap.
    num_rows = 8192 // NUM_GPU_RANKS * NUM_GPU_RANKS
    whole = torch.randn(batch, num_rows, dim, device=alone.mlp.up.weight.device, dtype=dtype)
    for _ in range(2):
        expected_x, own_x = (whole.clone().requires_grad_() for _ in range(2))
        expected = alone(expected_x)
        result = gathered(1)(module(scattered(1)(own_x, mesh)), mesh)
        close = CLOSE[dtype]
        torch.testing.assert_close(result, expected, atol=close, rtol=close)
        weights = torch.randn_like(expected) / 64
        disttrain.broadcast(weights, 0)
        (expected * weights).sum().backward()
        (result * weights).sum().backward()
        torch.testing.assert_close(own_x.grad, expected_x.grad, atol=close, rtol=close)
    own = dict(module.named_parameters())
    for name, parameter in alone.named_parameters():
        grad = own[name].grad
        assert isinstance(grad, DTensor)
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(grad.full_tensor(), parameter.grad, atol=close * scale, rtol=close, msg=name)
