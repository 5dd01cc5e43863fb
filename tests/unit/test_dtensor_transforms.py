"""Transforms, quantiles and slices of uneven and empty parts: values, shapes and gradients on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fft

from disttrain.testing import run_threads
from tests.cases.dtensors import check_same, counted, placements_of
from tests.cases.shardings import check, mesh_of, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")

MESHES = ((2,), (4,), (2, 2), (1, 3))
X = normal(5, 3)
PARTS = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)


BREAKS_ON_META = pytest.mark.xfail(torch.__version__ < "2.12", reason="torch 2.11's fft_c2c breaks without values")


@pytest.mark.parametrize("dim", [pytest.param(0, marks=BREAKS_ON_META), 1])
def test_fourier(dim: int) -> None:
    transforms: list[Callable[[torch.Tensor], Any]] = [
        lambda x: torch.view_as_real(fft.fft(x, dim=dim)),
        lambda x: fft.irfft(fft.rfft(x, dim=dim), n=x.shape[dim], dim=dim),
        lambda x: fft.fft(x, n=7, dim=dim).real,
        lambda x: fft.rfft2(x, dim=(1 - dim, dim)).abs(),
    ]
    check(lambda x: [transform(x) for transform in transforms], X, meshes=MESHES, num_choices=8, gradients=True)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_quantiles(dim: int | None) -> None:
    def quantiles(x: torch.Tensor, parts: torch.Tensor) -> list[torch.Tensor]:
        return [
            function(x, part, dim, keepdim)
            for function in (torch.quantile, torch.nanquantile)
            for part in (0.3, parts)
            for keepdim in (False, True)
        ]

    check(quantiles, X, PARTS, meshes=((3,), (2, 2)), num_choices=2, gradients=True)


def test_gradients_of_slices() -> None:
    slices: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x.diff(dim=0),
        *(
            lambda x, bounds=bounds: x[bounds] * 1
            for bounds in (slice(0, 4), slice(1, 5), slice(1, 4), slice(0, 5, 2), slice(2, 2))
        ),
    ]

    def body(mesh_shape: tuple[int, ...]) -> None:
        mesh = mesh_of(mesh_shape)
        for placements in placements_of(mesh, 2):
            for function in slices:
                check_same(function, [counted(5, 3)], mesh, [placements])
            # A gradient that two axes cut along the dim that was sliced.
            check_same(
                lambda grad: torch.ops.aten.slice_backward(grad, [5, 3], 0, 0, 4, 1),
                [counted(4, 3)],
                mesh,
                [placements],
                with_gradients=False,
            )

    for mesh_shape in ((3,), (2, 2)):
        run_threads(torch.Size(mesh_shape).numel(), body, mesh_shape)
