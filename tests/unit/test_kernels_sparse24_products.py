"""Sparse products of 2:4 weights: masks that serve both ways, and what is multiplied when; the library is played."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from disttrain.errors import LayoutError, ShapeError
from disttrain.kernels import Sparse24, SparseLinear, use_sparse24
from disttrain.kernels.sparse24 import product as sparse24_product
from disttrain.kernels.sparse24.product import mask24_of_tiles
from tests.cases.kernels import drawn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what the library would have multiplied; a packed matrix is the matrix here."""
    shapes: list[tuple[int, ...]] = []

    def multiply(packed: torch.Tensor, x: torch.Tensor, algorithm: int) -> torch.Tensor:
        shapes.append((*x.shape, len(packed)))
        assert bool((packed.unflatten(-1, (-1, 4)) != 0).sum(-1).le(2).all())
        return x @ packed.t()

    monkeypatch.setattr(sparse24_product, "takes_packed", sparse24_product.takes_tiles)
    monkeypatch.setattr("disttrain.kernels.sparse24.training.takes_packed", sparse24_product.takes_tiles)
    monkeypatch.setattr(sparse24_product, "pack24", torch.clone)
    monkeypatch.setattr(sparse24_product, "multiply24", multiply)
    monkeypatch.setattr(sparse24_product, "_measured", lambda *_: 0)
    monkeypatch.setattr(sparse24_product, "_ALGORITHMS", sparse24_product._Algorithms())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return shapes


def test_masks_of_tiles_keep_the_most() -> None:
    weight = drawn(8, 12).float()
    mask = mask24_of_tiles(weight)
    pairs = [pair for pair in product((False, True), repeat=4) if sum(pair) == 2]
    every = [torch.tensor(rows) for rows in product(pairs, repeat=4)]
    both_ways = [one for one in every if one.sum(0).tolist() == [2, 2, 2, 2]]
    for row, column in product(range(0, 8, 4), range(0, 12, 4)):
        tile, kept = weight[row : row + 4, column : column + 4].abs(), mask[row : row + 4, column : column + 4]
        assert kept.sum(0).tolist() == kept.sum(1).tolist() == [2, 2, 2, 2]
        assert float(tile[kept].sum()) == pytest.approx(max(float(tile[one].sum()) for one in both_ways))


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 12), nn.Linear(12, 3))
    use_sparse24(model, report=lambda _: None)
    return model


def test_training_is_that_of_dense_products(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_packed in (True, False):
        if not is_packed:
            monkeypatch.setattr("disttrain.kernels.sparse24.training.takes_packed", lambda _: False)
        model, x = layers(), torch.empty(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        Sparse24(model, optimizer, every=2, products="sparse")
        for step in range(3):
            x = drawn(2, 4, 16, seed=step).float().requires_grad_()
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([*model.parameters(), x.grad])
    torch.testing.assert_close(*found)
    # Forward and backward of two layers in each step; the third one's sizes are no multiples of 16.
    assert calls == [(8, 16, 32), (8, 32, 16), (8, 16, 32), (8, 32, 16)] * 3


def test_a_weight_that_others_have_written_is_multiplied_as_it_is(calls: list[tuple[int, ...]]) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Sparse24(model, optimizer, products="sparse")
    layer, x = model[0], drawn(8, 16).float()
    assert isinstance(layer, SparseLinear)
    model.load_state_dict(layers(1).state_dict())
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert calls == []
    # Rows of what is multiplied are eights; other dtypes are multiplied as torch does.
    Sparse24(model, optimizer, products="sparse")
    torch.testing.assert_close(layer(x[:5]), F.linear(x[:5], layer.weight, layer.bias))
    assert calls == []
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert calls == [(8, 16, 32)]


def test_a_model_that_changes_its_dtype_is_packed_anew(calls: list[tuple[int, ...]]) -> None:
    model = layers().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Sparse24(model, optimizer, products="sparse")
    layer, x = model[0], drawn(8, 16).half()
    assert isinstance(layer, SparseLinear)
    model.half()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-2, atol=1e-2)
    assert calls == [(8, 16, 32)]


def test_a_graph_is_captured_with_what_was_measured_before(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    Sparse24(model, torch.optim.SGD(model.parameters(), lr=0.1), products="sparse")
    x = drawn(8, 16).float()
    model[0](x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(sparse24_product, "_measured", None)
    model[:3](x)
    assert calls == [(8, 16, 32), (8, 16, 32)]


def test_bad_input_is_told(calls: list[tuple[int, ...]]) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ShapeError, match="products is 'fast'"):
        Sparse24(model, optimizer, products="fast")  # type: ignore[arg-type]
    Sparse24(model, optimizer, products="sparse")
    with pytest.raises(LayoutError, match="create_graph"):
        torch.autograd.grad(model(drawn(8, 16).float()).sum(), list(model.parameters()), create_graph=True)
