"""2:4 sparse products by cuSPARSELt, judged by dense ones of the same weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from disttrain.kernels import AdamW, Sparse24, use_sparse24
from disttrain.kernels._torch import search24
from disttrain.kernels.sparse24 import product as sparse24_product
from tests.cases.kernels import drawn

pytestmark = pytest.mark.skipif(
    not torch.backends.cusparselt.is_available(), reason="torch was built without cuSPARSELt"
)


# Dynamo makes an instance where it traces one, and Inductor loads what torch itself finds old.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_products_are_those_of_dense_weights(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[tuple[int, ...]] = []

    def search(packed: torch.Tensor, x: torch.Tensor) -> int:
        searched.append(tuple(x.shape))
        return search24(packed, x)

    monkeypatch.setattr(sparse24_product, "search24", search)
    monkeypatch.setattr(sparse24_product, "_is_faster", lambda *_: True)
    monkeypatch.setattr(sparse24_product, "_ALGORITHMS", sparse24_product._Algorithms())
    torch.manual_seed(0)
    first, last = nn.Linear(256, 512), nn.Linear(512, 128, bias=False)
    model = nn.Sequential(first, nn.GELU(), last).cuda().bfloat16()
    use_sparse24(model, filter=lambda *_: True, report=lambda _: None)
    optimizer = AdamW(model.parameters(), lr=0.01)
    Sparse24(model, optimizer, every=2, products="sparse")
    run = torch.compile(model, fullgraph=True) if is_compiled else model
    for step in range(3):
        x = drawn(3, 64, 256, seed=step).cuda().bfloat16().requires_grad_()
        run(x).float().square().mean().backward()
        leaves = [one.detach().clone().requires_grad_() for one in (x, first.weight, first.bias, last.weight)]
        for weight in (leaves[1], leaves[3]):
            assert all(int((one.unflatten(1, (-1, 4)) != 0).sum(-1).max()) == 2 for one in (weight, weight.t()))
        result = F.linear(F.gelu(F.linear(leaves[0], leaves[1], leaves[2])), leaves[3])
        wished = torch.autograd.grad(result.float().square().mean(), leaves)
        for one, other in zip((x, first.weight, first.bias, last.weight), wished, strict=True):
            assert one.grad is not None
            torch.testing.assert_close(one.grad, other, rtol=5e-2, atol=2e-2 * other.abs().max().item())
        optimizer.step()
        optimizer.zero_grad()
    # Forward and the input's gradient, of both layers.
    assert sorted(searched) == [(192, 128), (192, 256), (192, 512), (192, 512)]
