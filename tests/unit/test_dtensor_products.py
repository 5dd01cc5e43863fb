"""Products of matrices and their kin on DTensors, judged by plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard
from disttrain.testing import run_threads
from tests.cases.shardings import check, collectives_of, laid_out, mesh_of, normal

aten = torch.ops.aten

X, Y = normal(5, 3), normal(3, 4, seed=1)
XS, YS = normal(2, 5, 3), normal(2, 3, 4, seed=1)
COMPLEX = torch.complex(normal(5), normal(5, seed=1))

PRODUCTS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "mm": (torch.mm, [X, Y]),
    "bmm": (torch.bmm, [XS, YS]),
    "mv": (torch.mv, [X, normal(3)]),
    "dot": (torch.dot, [normal(5), normal(5, seed=1)]),
    "vdot": (torch.vdot, [COMPLEX, COMPLEX.flip(0)]),
    "addmv": (torch.addmv, [normal(5), X, normal(3)]),
    "addr": (torch.addr, [X, normal(5), normal(3)]),
    "addbmm": (torch.addbmm, [normal(5, 4), XS, YS]),
    "baddbmm": (lambda *each: torch.baddbmm(*each, beta=0.5, alpha=2.0), [normal(4), XS, YS]),
    "addmm in place": (lambda bias, x, y: bias.clone().addmm_(x, y, beta=0.5), [normal(5, 4), X, Y]),
    "addmv in place": (lambda bias, x, y: bias.clone().addmv_(x, y), [normal(5), X, normal(3)]),
    "distances": (aten._euclidean_dist, [normal(5, 3), normal(4, 3, seed=1)]),
    "distances of a batch": (lambda x, y: aten._cdist_forward(x, y, 3.0, None), [XS, normal(1, 4, 3, seed=1)]),
    "trilinear": (
        lambda x, y, z: aten._trilinear(x, y, z, [1, 3], [0], [1, 2], [2, 3]),
        [normal(5, 3), normal(4, 3, 2), normal(5, 2)],
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    function, operands = PRODUCTS[name]
    check(function, *operands)


@pytest.mark.parametrize("shape", [(5, 4), (4,), (1, 4), (5, 1), ()])
def test_what_is_added_counts_once(shape: tuple[int, ...]) -> None:
    check(lambda bias, x, y: torch.addmm(bias, x, y, beta=0.5, alpha=2.0), normal(*shape, seed=4), X, Y, num_choices=12)


@settings(max_examples=25)
@given(st.data())
def test_any_sizes_and_placements(data: st.DataObject) -> None:
    rows, inner, columns, num_ranks = (data.draw(st.integers(low, 4)) for low in (0, 0, 0, 1))
    placements = st.sampled_from([Replicate(), Shard(0), Shard(1), Partial()])
    chosen = [data.draw(placements) for _ in range(3)]
    operands = [normal(rows, columns, seed=2), normal(rows, inner), normal(inner, columns, seed=1)]

    def body() -> torch.Tensor:
        mesh = mesh_of((num_ranks,))
        bias, x, y = [laid_out(operand, mesh, [place]) for operand, place in zip(operands, chosen, strict=True)]
        found = torch.addmm(bias, x, y)
        assert isinstance(found, DTensor)
        return found.full_tensor()

    for found in run_threads(num_ranks, body):
        torch.testing.assert_close(found, torch.addmm(*operands))


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ((Replicate(), Shard(0), Replicate()), Shard(0)),
        ((Shard(0), Replicate(), Shard(1)), Shard(1)),
        ((Replicate(), Shard(1), Shard(0)), Partial()),
        ((Partial(), Partial(), Replicate()), Partial()),
        ((Replicate(), Shard(1), Replicate()), Partial()),
    ],
)
def test_products_of_fitting_parts_move_nothing(placements: tuple[Placement, ...], expected: Placement) -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        operands = [
            laid_out(operand, mesh, [placement])
            for operand, placement in zip((normal(4), X, Y), placements, strict=True)
        ]
        assert collectives_of(lambda: torch.addmm(*operands)) == []
        assert torch.addmm(*operands).placements == (expected,)

    run_threads(2, body)
