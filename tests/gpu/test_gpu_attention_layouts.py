"""Gradients of cuDNN's attention, whose plans torch keeps by sizes and strides of query, key and value alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from disttrain.kernels import Causal, attention
from disttrain.kernels.attention.context.blocks import bands, dense
from disttrain.kernels.attention.context.blocks.dense import Places
from disttrain.kernels.attention.context.blocks.pieces import CAUSAL
from disttrain.kernels.attention.plan import CUDNN
from tests.cases.kernels import drawn

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:cuDNN SDPA backward"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="cuDNN's kernel needs 9.0"
    ),
]

BATCH_SIZE, LENGTH, WIDTH, SCALE = 2, 256, 64, 0.125
CLOSE = {"rtol": 3e-2, "atol": 3e-2}
Layout = Callable[[torch.Tensor], torch.Tensor]


def by_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous()


def by_positions(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def by_sequence(tensor: torch.Tensor) -> torch.Tensor:
    """As models with the sequence first have it."""
    return tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def second_half(tensor: torch.Tensor) -> torch.Tensor:
    """As positions of a rank that has two runs of them."""
    return torch.cat([torch.full_like(tensor, torch.nan), by_positions(tensor)], 2)[:, :, LENGTH:]


def of_one(tensor: torch.Tensor) -> torch.Tensor:
    """As of a result that was cut from one with wider heads."""
    return torch.nn.functional.pad(tensor, (0, 8), value=torch.nan)[..., :WIDTH]


LAYOUTS: dict[str, Layout] = {
    "by heads": by_heads,
    "by positions": by_positions,
    "by sequence": by_sequence,
    "second half": second_half,
    "narrowed": of_one,
}


def inputs(num_heads: int, seed: int) -> torch.Tensor:
    return drawn(BATCH_SIZE, num_heads, LENGTH, WIDTH, seed=seed).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_every_layout_have_a_plan_of_their_own(layout: Layout) -> None:
    """In one process, one behind the other: each meets the plans of those before."""
    query, key, value = layout(inputs(4, 0)), inputs(2, 1), layout(inputs(2, 2))
    places = Places(Causal(), torch.arange(LENGTH).cuda(), torch.arange(LENGTH).cuda(), SCALE)
    exact = [tensor.double() for tensor in (query, key, value)]
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True)
    exact_out, exact_lse = dense.forward(*exact, places)
    for seed, (name, of_grad) in enumerate(LAYOUTS.items()):
        grad_out = of_grad(inputs(4, 3 + seed))
        wanted = dense.backward(grad_out.double(), *exact, exact_out, exact_lse, places)
        own = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        for attend in (attention, compiled):
            result = attend(*own, Causal(), scale=SCALE, by=CUDNN)
            for grad, wish in zip(torch.autograd.grad(result, own, grad_out), wanted, strict=True):
                torch.testing.assert_close(grad.double(), wish, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
        for of_out in LAYOUTS.values():
            out = of_out(exact_out.bfloat16())
            for grad, wish in zip(
                bands.backward(CUDNN, CAUSAL, grad_out, query, key, value, out, exact_lse.float(), SCALE),
                wanted,
                strict=True,
            ):
                torch.testing.assert_close(grad.double(), wish, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
