"""Copies of many tensors in one launch."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from disttrain.kernels.copies import operator as copies
from disttrain.kernels.copies.operator import copy_all, pack_rows, unpack_rows
from disttrain.pieces import piece_size
from tests.cases.kernels import IMPLEMENTATIONS, drawn, use_implementation

SHAPES = [(3, 5), (0, 4), (2049,), (64, 64), ()]


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_implementation(request.param, monkeypatch)


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float32, torch.float32)],
)
def test_casts(source: torch.dtype, target: torch.dtype) -> None:
    sources = [drawn(*shape, seed=seed, dtype=source) for seed, shape in enumerate(SHAPES)]
    targets = [torch.empty(shape, dtype=target) for shape in SHAPES]
    copy_all(targets, sources)
    for found, wished in zip(targets, sources, strict=True):
        # Triton's interpreter cuts off where a GPU rounds.
        torch.testing.assert_close(found, wished.to(target), rtol=1e-3, atol=1e-6)
    scaled = [torch.empty(shape, dtype=target) for shape in SHAPES]
    copy_all(scaled, sources, torch.tensor(0.25))
    for found, one in zip(scaled, targets, strict=True):
        torch.testing.assert_close(found, one * 0.25, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.uint8, torch.uint8),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("shapes", [[(5, 3), (1,), (0, 4), (2, 70)], [(48, 16), (96,), (3000, 16)]], ids=str)
def test_rows(shapes: list[tuple[int, ...]], source: torch.dtype, target: torch.dtype, num_rows: int) -> None:
    """Pieces of uneven sizes with padding, and of even ones, there and back, in rows of a wider matrix too."""
    tensors = [drawn(*shape, seed=seed).mul(50).to(source) for seed, shape in enumerate(shapes)]
    numels = [tensor[:1].numel() if len(tensor) else 0 for tensor in tensors]
    sizes = [piece_size(len(each), num_rows) * numel for each, numel in zip(tensors, numels, strict=True)]
    wide = torch.full((num_rows, sum(sizes) + 5), 7, dtype=target)
    for matrix in (wide[:, : sum(sizes)].contiguous(), wide[:, : sum(sizes)]):
        pack_rows(tensors, sizes, matrix)
        places = [torch.empty(num_rows, size, dtype=source) for size in sizes]
        unpack_rows(matrix, sizes, places)
        columns = zip(matrix.split(sizes, dim=1), tensors, places, strict=True)
        for column, tensor, place in columns:
            padding = column.numel() - tensor.numel()
            wished = torch.cat([tensor.reshape(-1), tensor.new_zeros(padding)]).view_as(column)
            # Triton's interpreter cuts off where a GPU rounds.
            torch.testing.assert_close(column, wished.to(target), rtol=1e-2, atol=0)
            torch.testing.assert_close(place, column.to(source))
    assert bool((wide[:, sum(sizes) :] == 7).all())


def test_what_one_launch_does_not_take() -> None:
    """Dtypes that differ, whole numbers, tensors that lie otherwise, nothing at all."""
    sources = [drawn(4, 3), drawn(4, 3).float().t(), torch.arange(5)]
    targets = [torch.empty(4, 3), torch.empty(3, 4), torch.empty(5, dtype=torch.int64)]
    copy_all(targets, sources)
    for found, wished in zip(targets, sources, strict=True):
        torch.testing.assert_close(found, wished.to(found.dtype))
    copy_all([], [])


def test_what_is_traced_takes_torch_s_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a kernel that is no operator, in a graph")

    monkeypatch.setattr(copies, "choose", refuse)

    def scaled(source: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        target = torch.empty_like(source, dtype=torch.bfloat16)
        copy_all([target], [source], scale)
        return target

    source, scale = torch.randn(5), torch.tensor(0.5)
    graph = make_fx(scaled, tracing_mode="fake")(source, scale)
    assert torch.equal(graph(source, scale), (source * scale).bfloat16())
