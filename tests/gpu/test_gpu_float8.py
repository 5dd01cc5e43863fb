"""float8 on a GPU: casts bit by bit as their reference's, products by fp64, training under fully_shard."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from llama.config import PRESETS
from llama.model import Llama
from torch import nn

import disttrain
from disttrain.compiling import compile_blocks
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.kernels import Float8Weight, float8_linear, use_float8
from disttrain.kernels.float8 import reference as float8_reference
from disttrain.kernels.float8 import shards_reference
from disttrain.kernels.float8.operator import cast
from disttrain.kernels.float8.shards import cast_shards
from disttrain.kernels.float8.shards_reference import Shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.kernels import drawn, values_and_grads
from tests.gpu.ranks import NUM_GPU_RANKS

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no products of float8")
    pytest.importorskip("triton.language")
    if "rank_pool" in request.fixturenames:
        return  # the pool's processes would keep it
    monkeypatch.setenv("DISTTRAIN_KERNELS", "triton")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (700, 512), (129, 4096), (4096, 48)], ids=str)
def test_casts_are_their_reference_s_bit_by_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (drawn(*shape) * torch.linspace(-12, 12, shape[1]).exp2()).to(dtype).cuda()
    for kind in FORMATS:
        for by_rows in (False, True):
            for wants in ((True, True), (True, False), (False, True)):
                found = cast(x, kind, by_rows=by_rows, wants_rows=wants[0], wants_columns=wants[1])
                wished = float8_reference.cast(x, None, 1, kind, by_rows, *wants)
                for one, other in zip(found, wished, strict=True):
                    assert one.shape == other.shape
                    assert torch.equal(as_bytes(one), as_bytes(other))
    codes, scales = cast(x, FORMATS[0], by_rows=True, wants_columns=False)[:2]
    for by_rows in (False, True):
        found = cast(codes, FORMATS[0], by_rows=by_rows, in_scales=scales)
        wished = float8_reference.cast(codes, scales, 1, FORMATS[0], by_rows, True, True)
        for one, other in zip(found, wished, strict=True):
            assert torch.equal(as_bytes(one), as_bytes(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by_rows", [False, True])
def test_shards_are_cast_at_once_bit_by_bit(by_rows: bool, dtype: torch.dtype) -> None:
    """Of sizes that are multiples of 16, and others; with padding, and without rows."""
    for sizes in ([(512, 4096, 512), (0, 64, 16), (1000, 1024, 1008)], [(37, 80, 40), (3, 1041, 7), (0, 16, 3)]):
        shards, end = [], 0
        for seed, (num_rows, num_columns, num_padded) in enumerate(sizes):
            values = drawn(num_rows, num_columns, seed=seed) * torch.linspace(-12, 12, num_columns).exp2()
            scales_start = end + (num_padded * num_columns + 15) // 16 * 16
            shards.append(Shard(values.to("cuda", dtype), num_padded, end, scales_start))
            end = scales_start + (4 * num_padded + 15) // 16 * 16
        results = []
        for run in (shards_reference.cast_shards, cast_shards):
            sent = torch.zeros(end, dtype=torch.uint8, device="cuda")
            run(shards, sent, FORMATS[0], by_rows=by_rows)
            results.append(sent.cpu())
        assert torch.equal(*results)


def test_small_layers_are_left_and_large_ones_change() -> None:
    state = torch.cuda.get_rng_state()
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(128, 128), nn.Linear(8192, 8192, bias=False)])
        found = use_float8(model, report=(lines := []).append)
    assert [one.name for one in found] == ["1"]
    assert any("left 0: 8192 x 128 to 128 take" in line for line in lines)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_what_is_not_finite_stays_so() -> None:
    for value in (float("nan"), float("inf")):
        x = torch.ones(32, 32, device="cuda", dtype=torch.bfloat16)
        x[3, 5] = value
        result = float8_linear(x, torch.ones(16, 32, device="cuda", dtype=torch.bfloat16))
        assert not result[3].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("num_tokens", [1, 37, 512])
def test_linear(recipe: str, dtype: torch.dtype, num_tokens: int) -> None:
    x, weight, bias = drawn(num_tokens, 256), drawn(512, 256, seed=1) / 16, drawn(512, seed=2)
    rounded = [tensor.to("cuda", dtype) for tensor in (x, weight, bias)]
    found = values_and_grads(lambda *inputs: float8_linear(*inputs, recipe=recipe), rounded)
    by_reference = values_and_grads(
        lambda *inputs: float8_linear(*inputs, recipe=recipe), [tensor.cpu() for tensor in rounded]
    )
    exact = values_and_grads(F.linear, [tensor.double() for tensor in rounded])
    for one, reference, wished in zip(found, by_reference, exact, strict=True):
        assert one.dtype == dtype
        assert (one.double() - wished).norm() <= 0.11 * wished.norm()
        # Products are summed up in fewer bits than fp32 in forward.
        assert (one.double().cpu() - reference.double()).norm() <= 5e-3 * reference.double().norm()


def step_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor loads
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_sharded_model_learns_as_in_bf16(recipe: str, is_compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Llama(PRESETS["tiny"]).cuda()
    plain.init()
    model = copy.deepcopy(plain)
    assert use_float8(model, recipe, num_tokens=None, report=lambda _: None)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    curves = []
    for one in (model, plain):
        if is_compiled:
            compile_blocks(one)
        for block in one.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(one, mp_policy=policy)
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        losses = []
        for step in range(24):
            generator = torch.Generator("cuda").manual_seed(1000 * disttrain.get_rank() + step % 4)
            loss = step_of(one, torch.randint(0, 256, (4, 64), device="cuda", generator=generator))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        curves.append(torch.stack(losses).double().cpu())
    found, wished = curves
    assert wished[-4:].mean() < 0.75 * wished[:4].mean()
    torch.testing.assert_close(found, wished, rtol=0.1, atol=0.0)
    model.blocks[0].unshard()
    assert any(isinstance(parameter, Float8Weight) for parameter in model.blocks[0].parameters())
    model.blocks[0].reshard()
