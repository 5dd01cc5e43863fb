"""Linear algebra and Fourier transforms of DTensors: dims that stay whole are gathered, the others stay cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from disttrain.dtensor import Shard
from disttrain.testing import run_threads
from tests.cases.shardings import check, collectives_of, laid_out, mesh_of, normal

linalg = torch.linalg

MATRICES = normal(3, 4, 4)
POSITIVE = torch.eye(4, dtype=torch.float64) + MATRICES @ MATRICES.mT
VECTORS = normal(3, 4, 2, seed=1)

BATCHED: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "det": (linalg.det, [MATRICES]),
    "slogdet": (linalg.slogdet, [MATRICES]),
    "inv": (linalg.inv, [MATRICES]),
    "cholesky": (linalg.cholesky, [POSITIVE]),
    "solve": (linalg.solve, [MATRICES, VECTORS]),
    "solve a vector": (linalg.solve, [MATRICES, normal(3, 4)]),
    "singular values": (linalg.svdvals, [MATRICES]),
    "eigenvalues": (lambda x: torch.ops.aten._linalg_eigh(x, "L", False)[0], [MATRICES]),
    "qr": (linalg.qr, [MATRICES]),
    "lu": (linalg.lu_factor, [MATRICES]),
    "lu solve": (lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b), [MATRICES, VECTORS]),
    "matrix exp": (linalg.matrix_exp, [MATRICES]),
    "triangular": (lambda a, b: linalg.solve_triangular(a, b, upper=True), [MATRICES, VECTORS]),
    "cross": (linalg.cross, [normal(4, 3), normal(1, 3, seed=2)]),
    "fft": (torch.fft.fft, [MATRICES]),
    "fft along the first dim": (lambda x: torch.fft.fft(x, dim=0), [MATRICES]),
    "rfft2": (torch.fft.rfft2, [MATRICES]),
}


@pytest.mark.parametrize("name", BATCHED)
def test_batched_operators(name: str) -> None:
    function, operands = BATCHED[name]
    # What is nearly singular would show how partial sums are rounded.
    check(function, *operands, may_be_partial=name not in ("cholesky", "lu", "lu solve", "triangular"))


def test_a_singular_matrix_raises_on_all_ranks() -> None:
    def body() -> None:
        matrices = MATRICES.clone()
        matrices[0] = 0
        with pytest.raises(linalg.LinAlgError):
            linalg.inv(laid_out(matrices, mesh_of((2,)), [Shard(0)]))

    run_threads(2, body)


def test_a_cut_batch_moves_nothing() -> None:
    def body() -> None:
        batch = laid_out(MATRICES, mesh_of((2,)), [Shard(0)])
        assert collectives_of(lambda: linalg.svdvals(batch)) == []
        assert collectives_of(lambda: torch.fft.fft(batch)) == []

    run_threads(2, body)
