"""Largest and smallest elements, and their gradients: ties share them across ranks, empty parts have none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from disttrain.testing import run_threads
from tests.cases.dtensors import check_same, placements_of
from tests.cases.shardings import mesh_of

TIED = torch.tensor([[1.0, 2, 2], [2, 2, 1], [2, 0, 2], [1, 1, 1], [2, 2, 2]], dtype=torch.float64)
ONE_ROW = TIED[:1]

FUNCTIONS: list[Callable[..., Any]] = [
    *(partial(torch.amax, dim=dim) for dim in (0, (0, 1))),
    lambda x: torch.maximum(x, x.flip(0)),
]

OTHERS: list[Callable[..., Any]] = [
    *(partial(torch.amin, dim=dim) for dim in (0, 1, (0, 1))),
    partial(torch.amax, dim=1),
    partial(torch.amax, dim=0, keepdim=True),
    torch.max,
    torch.min,
    lambda x: torch.linalg.vector_norm(x, float("inf")),
    # Before torch 2.13 it has no gradient.
    *([lambda x: torch.aminmax(x, dim=0)] if torch.__version__ >= "2.13" else []),
]
"""A second axis does to them what it does to the first ones."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (1, 3)])
def test_ties_share_the_gradient(mesh_shape: tuple[int, ...]) -> None:
    def body() -> None:
        mesh = mesh_of(mesh_shape)
        for whole in (TIED, ONE_ROW):
            for placements in placements_of(mesh, 2):
                for function in FUNCTIONS if mesh.ndim > 1 else (*FUNCTIONS, *OTHERS):
                    check_same(function, [whole], mesh, [placements])

    run_threads(torch.Size(mesh_shape).numel(), body)
