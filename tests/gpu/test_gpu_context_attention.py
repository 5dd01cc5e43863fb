"""Kernels of attention over some keys, and attention cut over ranks, against products in fp64."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain.kernels import Causal, attention
from disttrain.kernels.attention.context.blocks import bands, dense, placed
from disttrain.kernels.attention.context.blocks.dense import Places
from disttrain.kernels.attention.context.blocks.pieces import ALL, CAUSAL
from disttrain.kernels.attention.context.parts import mirrored
from disttrain.kernels.attention.context.planning.heads_cut import heads_divide
from disttrain.kernels.attention.context.sums import reference, triton_kernels
from disttrain.kernels.attention.plan import CUDNN, FLASH
from disttrain.kernels.attention.rules import Rule, SlidingWindow
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.attention import NAMES, on, rule_called
from tests.cases.kernels import drawn
from tests.gpu.ranks import NUM_GPU_RANKS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:cuDNN SDPA backward")

CLOSE = {"rtol": 3e-2, "atol": 3e-2}


def inputs(num_queries: int, num_keys: int) -> list[torch.Tensor]:
    """Query, key, value, the result's gradient and a result of more keys: in bf16."""
    shapes = [(4, num_queries), (2, num_keys), (2, num_keys), (4, num_queries), (4, num_queries)]
    return [
        drawn(2, heads, length, 64, seed=seed).to("cuda", torch.bfloat16) for seed, (heads, length) in enumerate(shapes)
    ]


def places_of(rule: Rule | None, queries: torch.Tensor, keys: torch.Tensor) -> Places:
    return Places(rule, queries.cuda(), keys.cuda(), 0.125)


@pytest.mark.parametrize("kernel", [CUDNN, FLASH])
@pytest.mark.parametrize("band", [ALL, CAUSAL, (43, -1), (100, 0)])
def test_bands(kernel: str, band: tuple[int, int]) -> None:
    if kernel == CUDNN and (band not in (ALL, CAUSAL) or torch.cuda.get_device_capability()[0] < 9):
        pytest.skip("cuDNN knows no windows")
    rules = {ALL: None, CAUSAL: Causal(), (43, -1): SlidingWindow(300), (100, 0): Causal() & SlidingWindow(101)}
    first_key = 0 if band == (43, -1) else 256
    places = places_of(rules[band], torch.arange(256, 512), torch.arange(first_key, first_key + 256))
    query, key, value, grad_out, more = inputs(256, 256)
    exact = [tensor.double() for tensor in (query, key, value)]
    expected, expected_lse = dense.forward(*exact, places)
    out, lse = bands.forward(kernel, band, query, key, value, 0.125)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)
    # As if more keys had been seen, but by one query, which has seen nothing.
    whole_lse = expected_lse + 0.5
    whole_lse[0, 0, 7] = -torch.inf
    grads = bands.backward(kernel, band, grad_out, query, key, value, more, whole_lse.float(), 0.125)
    whole_lse[0, 0, 7] = torch.inf
    wanted = dense.backward(grad_out.double(), *exact, more.double(), whole_lse, places)
    for grad, wish in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), wish, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_rules_at_positions(name: str) -> None:
    parts, rule = mirrored(1200, 2), on(rule_called(name, 2, 4, 1200), "cuda")
    places = places_of(rule, parts.positions(1), parts.positions(0))
    query, key, value, grad_out, _ = inputs(600, 600)
    exact = [tensor.double() for tensor in (query, key, value)]
    expected, expected_lse = dense.forward(*exact, places)
    out, lse = placed.forward(query, key, value, places)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)
    whole_lse = expected_lse + 0.5
    grads = placed.backward(grad_out, query, key, value, out, whole_lse.float(), places)
    wanted = dense.backward(grad_out.double(), *exact, out.double(), whole_lse, places)
    for grad, wish in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), wish, **CLOSE)


@pytest.mark.timeout(300)
@on_ranks(NUM_GPU_RANKS, timeout_s=280)
@pytest.mark.parametrize("name", ["causal", "one-sided", "causal documents", "all"])
def test_cut_over_ranks(name: str) -> None:
    mesh = disttrain.init_device_mesh("cuda", (NUM_GPU_RANKS,), mesh_dim_names=("cp",))
    parts, rank = mirrored(1200, NUM_GPU_RANKS), mesh.get_local_rank()
    tensors = [drawn(2, heads, 1200, 64, seed=heads).to("cuda", torch.bfloat16) for heads in (4, 2, 2)]
    weight = drawn(2, 4, 1200, 64, seed=9).to("cuda", torch.bfloat16)
    rule = on(rule_called(name, 2, 4, 1200), "cuda")
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    positions = torch.arange(1200, device="cuda")
    places = Places(rule, positions, positions, 0.125)
    expected, lse = dense.forward(*(tensor.detach() for tensor in exact), places)
    wanted = dense.backward(weight.double(), *(tensor.detach() for tensor in exact), expected, lse, places)
    ways = ("ring", "gather", "heads") if heads_divide(4, 2, NUM_GPU_RANKS) else ("ring", "gather")
    for way in ways:
        own = [parts.take(tensor, rank, 2).clone().requires_grad_() for tensor in tensors]
        result = attention(*own, rule, axis=mesh["cp"], parts=parts, way=way)
        torch.testing.assert_close(result.double(), parts.take(expected, rank, 2), **CLOSE)
        grads = torch.autograd.grad(result, own, parts.take(weight, rank, 2))
        for grad, wish in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad.double(), parts.take(wish, rank, 2), **CLOSE)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 64), (torch.float32, 96), (torch.float16, 128)])
def test_results_are_joined(dtype: torch.dtype, width: int) -> None:
    """By one kernel, of parts of tensors, and where one or both have seen nothing."""
    out, other = (drawn(2, 3, 300, width, seed=seed).to("cuda", dtype)[:, :, 7:] for seed in (1, 2))
    lse, other_lse = (drawn(2, 3, 300, 1, seed=seed)[..., 0].to("cuda", torch.float32)[:, :, 7:] for seed in (3, 4))
    lse[0, :, :20], other_lse[0, :, 10:30] = -torch.inf, -torch.inf
    kernel, by_torch = (out.float().clone(), lse.clone()), (out.float().clone(), lse.clone())
    triton_kernels.join(*kernel, other, other_lse)
    reference.join(*by_torch, other, other_lse)
    torch.testing.assert_close(kernel, by_torch, rtol=1e-5, atol=1e-5)
