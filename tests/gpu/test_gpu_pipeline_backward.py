"""A backward in two parts gives, bit for bit, the gradients of one, by the GPU's kernels as well."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from disttrain.pipelining.model.backward import Backward
from disttrain.pipelining.model.layers import split_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch says so where the first that the thread of a backward pass calls is cuBLAS.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


class Block(nn.Module):
    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.inner_norm = nn.LayerNorm(4 * dim)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=bias), nn.Linear(4 * dim, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.inner_norm(self.up(self.norm(x)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_the_same(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(512, 256), Block(256, bias), Block(256, bias), nn.Linear(256, 512, bias=bias))
    plain = plain.to("cuda", dtype)
    split = copy.deepcopy(plain)
    assert split_layers(split) == 10
    for _ in range(2):
        tokens = torch.randint(0, 512, (4, 128), device="cuda")
        expected, backward = plain(tokens), Backward()
        with backward.forward():
            found = split(tokens)
        assert torch.equal(found, expected)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        assert backward.backward_input([found], [grad], [tokens]) == (None,)
        backward.backward_weight()
        for own, other in zip(split.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)
    x = torch.randn(4, 128, 256, device="cuda", dtype=dtype).requires_grad_()
    expected, backward = plain[1:](x), Backward()
    with backward.forward():
        found = split[1:](x)
    expected.backward(grad)
    (x_grad,) = backward.backward_input([found], [grad], [x])
    assert x.grad is not None
    assert torch.equal(x_grad, x.grad)
