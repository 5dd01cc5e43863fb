"""Reading and writing elements at given places of DTensors in every layout, judged by plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import disttrain
from disttrain.dtensor import CommDebugMode, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.testing import run_threads
from tests.cases.layouts import Case, integers, normal, right

MESHES = [(6,), (2, 2), (1, 3), (2, 1)]
aten = torch.ops.aten

X, CUBE = normal(5, 4), normal(3, 5, 2)
FLAGS = X > 0
ROW_PLACES, COLUMN_PLACES = integers(5, 5, 4), integers(4, 5, 6, seed=2)
FEW_PLACES = integers(5, 3, 4, seed=1)
ROWS = integers(5, 6, seed=5)
DISTINCT = torch.tensor([4, 1, 2])
PAIRS = (torch.tensor([[0], [2], [4]]), torch.tensor([1, 3]))
# Each column names a row once only, so that what is written last does not depend on who writes.
ONCE = ((torch.arange(5)[:, None] + torch.arange(4)) % 5)[:3]


def case(name: str, function: Callable[..., Any], *tensors: torch.Tensor, grads: bool = False) -> Case:
    """Indices and masks are never partial, and have no gradient."""
    fixed = [place for place, tensor in enumerate(tensors) if not tensor.is_floating_point()]
    return Case(name, function, tensors, fixed=fixed, grads=grads, partials=("sum", "max"))


READS = [
    read
    for grads in (False, True)
    for read in (
        case("gather rows", lambda x, i: x.gather(0, i), X, ROW_PLACES, grads=grads),
        case("gather more columns", lambda x, i: x.gather(1, i), X, COLUMN_PLACES, grads=grads),
        case("gather fewer rows", lambda x, i: x.gather(0, i), X, FEW_PLACES, grads=grads),
        case("select rows", lambda x, i: x.index_select(0, i), X, ROWS, grads=grads),
        case("select columns", lambda x, i: x.index_select(1, i), X, ROWS % 4, grads=grads),
        case("take", torch.take, X, ROW_PLACES * 3, grads=grads),
        case("rows, from the end", lambda x, i: x[i], X, ROWS - 2, grads=grads),
        case("pairs", lambda x, i, j: x[i, j], X, ROWS, ROWS % 4 - 4, grads=grads),
        case("rows by columns", lambda x, i, j: x[i, j], X, *PAIRS, grads=grads),
        case("inner dim", lambda x, i: aten.index(x, [None, i]), CUBE, integers(5, 4, 2), grads=grads),
        case("dims apart", lambda x, i, j: aten.index(x, [i, None, j]), CUBE, ROWS % 3, integers(2, 6), grads=grads),
    )
] + [
    case("counts", lambda x, i: x[i], integers(9, 5, 4), ROWS),
    case("flags", lambda x, i: x[i], FLAGS, ROWS),
    case("flags gathered", lambda x, i: x.gather(0, i), FLAGS, ROW_PLACES),
    case("mask", lambda x, mask: x[mask], X, FLAGS),
    case("masked_select", torch.masked_select, X, FLAGS),
    case("nonzero", torch.nonzero, FLAGS),
]


def scatters(inplace: str) -> list[Case]:
    source, more = normal(3, 4, seed=9), normal(5, 6, seed=9)

    def method(name: str, *before: Any, **options: Any) -> Callable[..., Any]:
        return lambda x, *tensors: getattr(x, name + inplace)(*before, *tensors, **options)

    return [
        case("scatter", method("scatter", 0), X, ONCE, source),
        case("scatter a value", lambda x, i: getattr(x, "scatter" + inplace)(0, i, 2.0), X, ONCE),
        case("scatter zero", lambda x, i: getattr(x, "scatter" + inplace)(0, i, 0), X, ONCE),
        case("scatter_add rows", method("scatter_add", 0), X, FEW_PLACES, source),
        case("scatter_add columns", method("scatter_add", 1), X, COLUMN_PLACES, more),
        *(
            case(
                f"scatter_reduce {kind} {include}",
                lambda x, i, v, kind=kind, include=include: getattr(x, "scatter_reduce" + inplace)(
                    1, i, v, kind, include_self=include
                ),
                X,
                COLUMN_PLACES,
                more,
            )
            for kind in ("sum", "prod", "mean", "amax", "amin")
            for include in (True, False)
        ),
        case("index_add rows", method("index_add", 0, alpha=2), X, ROWS, normal(6, 4)),
        case("index_add columns", method("index_add", 1), X, ROWS % 4, normal(5, 6)),
        case("index_copy rows", method("index_copy", 0), X, DISTINCT, normal(3, 4)),
        case("index_copy columns", method("index_copy", 1), X, DISTINCT - 1, normal(5, 3)),
        case("index_fill", lambda x, i: getattr(x, "index_fill" + inplace)(0, i, 2.0), X, DISTINCT),
        case("index_reduce", method("index_reduce", 0, reduce="amax"), X, ROWS, normal(6, 4)),
        case("masked_fill", lambda x, mask: getattr(x, "masked_fill" + inplace)(mask, 2.0), X, FLAGS[:, :1]),
        case("masked_fill zero", lambda x, mask: getattr(x, "masked_fill" + inplace)(mask, 0.0), X, FLAGS),
        case("masked_scatter", method("masked_scatter"), X, FLAGS, normal(5, 4, seed=4)),
        *(
            put
            for accumulate in (True, False)
            for put in puts("index_put" + inplace, "put" + inplace, accumulate=accumulate)
        ),
    ]  # fmt: skip


def puts(index_put: str, put: str, *, accumulate: bool) -> list[Case]:
    rows = ROWS - 2 if accumulate else DISTINCT - 5
    write = getattr(aten, index_put)
    return [
        case("put rows", lambda x, i, v: write(x, [i], v, accumulate), X, rows, normal(len(rows), 4)),
        case("put one row", lambda x, i, v: write(x, [i], v, accumulate), X, rows, normal(4)),
        case("put inside", lambda x, i, v: write(x, [None, i], v, accumulate), CUBE, rows, normal(3, len(rows), 2)),
        case(
            "put apart",
            lambda x, i, j, v: write(x, [i, None, j], v, accumulate),
            CUBE,
            torch.tensor([0, 2, 1]),
            torch.tensor([1, 0, -1]),
            normal(3, 5),
        ),
        case("put pairs", lambda x, i, j, v: write(x, [i, j], v, accumulate), X, *PAIRS, normal(3, 2)),
        case("put a mask", lambda x, mask, v: write(x, [mask], v, accumulate), X, FLAGS, torch.tensor(3.0).double()),
        case("put", lambda x, i, v: getattr(x, put)(i, v, accumulate), X, torch.tensor([7, 3, 19]), normal(3)),
    ]


GRADIENTS = [
    case("scatter zero", lambda x, i: x.scatter(0, i, 0), X, ONCE, grads=True),
    case("scatter", lambda x, i, v: x.scatter(0, i, v), X, ONCE, normal(3, 4), grads=True),
    case("scatter_add", lambda x, i, v: x.scatter_add(0, i, v), X, FEW_PLACES, normal(3, 4), grads=True),
    case("index_add", lambda x, i, v: x.index_add(0, i, v), X, ROWS, normal(6, 4), grads=True),
    case("put more", lambda x, i, v: x.index_put((i,), v, True), X, ROWS, normal(6, 4), grads=True),
]

SLICES = [
    *(
        case(f"select {dim} {index}", partial(torch.select_scatter, dim=dim, index=index), X, normal(4 + dim))
        for dim in (0, 1)
        for index in (0, -1, 2)
    ),
    *(
        case(
            f"slice {start} {end} {step}",
            partial(torch.slice_scatter, dim=0, start=start, end=end, step=step),
            X,
            normal(len(range(5)[start:end:step]), 4),
        )
        for start, end, step in ((0, 3, 1), (1, None, 2), (-3, -1, 1), (None, None, 3), (3, 2, 1))
    ),
    case("diagonal", torch.diagonal_scatter, X, normal(4)),
    case("diagonal in a cube", lambda x, v: x.diagonal_scatter(v, 1, 0, 2), CUBE, normal(5, 1)),
]  # fmt: skip


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize(
    "cases",
    [READS, scatters(""), scatters("_"), GRADIENTS, SLICES],
    ids=["reads", "writes", "in place", "gradients", "slices"],
)
def test_results_and_gradients_are_those_of_plain_tensors(cases: list[Case], mesh_shape: tuple[int, ...]) -> None:
    right(cases, mesh_shape, max_layouts=2)


def test_what_is_looked_up_does_not_move() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))

        def laid(tensor: torch.Tensor, placement: Placement) -> DTensor:
            return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

        with CommDebugMode() as comms:
            by_rows = laid(X, Shard(0)), laid(ROW_PLACES, Shard(0))
            assert by_rows[0].gather(1, by_rows[1] % 4).placements == (Shard(0),)
            assert by_rows[0].new_zeros(5, 9).placements == (Shard(0),)
            assert by_rows[0].scatter_add(1, by_rows[1] % 4, by_rows[0]).placements == (Shard(0),)
            # A cut table brings sums, cut places bring cut rows.
            assert laid(X, Shard(0))[laid(ROWS, Replicate())].placements == (Partial("sum"),)
            assert laid(X, Replicate())[laid(ROWS, Shard(0))].placements == (Shard(0),)
            # Different ranks add different rows to one whole table: a sum.
            added = laid(X, Replicate()).index_add(0, laid(ROWS, Shard(0)), laid(normal(6, 4), Shard(0)))
            assert added.placements == (Partial("sum"),)
            laid(X, Shard(0)).index_put_((laid(ROWS, Replicate()),), laid(normal(4), Replicate()), accumulate=True)
        assert comms.get_comm_counts() == {}

    run_threads(2, body)
