"""Reductions and ordered dims of DTensors in every layout, judged by plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import disttrain
from disttrain.dtensor import CommDebugMode, DTensor, Partial, Replicate, Shard, distribute_tensor
from disttrain.testing import run_threads
from tests.cases.layouts import Case, integers, normal, right

# Three ranks cut 5 rows unevenly; six leave one without any, and in 2 x 3 some have rows without columns.
MESHES = [(6,), (2, 3), (1, 3), (2, 1)]

X, Y = normal(5, 4), normal(5, 4, seed=3)
CUBE = normal(3, 5, 2)
COUNTS = integers(9, 5, 4) - 4
FLAGS = X > 0
TIED = integers(3, 5, 4).double()
INFINITE = torch.full((5, 4), float("-inf"), dtype=torch.float64)
ODD = TIED.clone()
ODD[3, 1], ODD[1, 2] = float("nan"), float("-inf")
EVERY_PARTIAL = ("sum", "max", "min")


def of(tensor: torch.Tensor, name: str, *args: Any, fixed: bool = False, grads: bool = False, **kwargs: Any) -> Case:
    return Case(
        f"{name}{args}{kwargs} of {tensor.dtype}",
        lambda x: getattr(torch, name)(x, *args, **kwargs),
        [tensor],
        fixed=(0,) if fixed else (),
        partials=("sum",) if grads else EVERY_PARTIAL,
        grads=grads,
    )


def each(tensors: Sequence[torch.Tensor], names: str, *options: Mapping[str, Any], fixed: bool = False) -> list[Case]:
    return [
        of(tensor, name, fixed=fixed, **option) for name in names.split() for tensor in tensors for option in options
    ]


ALL: Mapping[str, Any] = {}
ROWS, COLUMNS = {"dim": 0}, {"dim": 1}
KEPT = {"dim": 1, "keepdim": True}

SUMS = [
    *each([X], "sum mean nansum amax amin", ROWS, {"dim": (0, 1)}, KEPT),
    *each([X], "prod", ROWS, COLUMNS),
    *each([X], "sum mean prod max min aminmax", ALL),
    *each([COUNTS], "sum prod amax any all count_nonzero", COLUMNS),
    *each([FLAGS], "sum any all amax amin", ROWS, {"dim": (0, 1)}),
    *each([FLAGS], "any all", {"dim": ()}),
    of(FLAGS.to(torch.uint8), "any"),
    of(X, "sum", 0, dtype=torch.int32),
    of(X, "sum", 0, dtype=torch.float32),
    of(COUNTS, "mean", 0, dtype=torch.float64),
    of(CUBE, "sum", (0, 2)),
    *each([torch.complex(X, Y)], "sum mean prod", ROWS),
    of(X, "aminmax", dim=0),
    of(ODD, "amax", 0, fixed=True),
    Case("dist", torch.dist, [X, Y]),
]

MOMENTS = [
    *each([X + 1e3], "std var std_mean var_mean", ROWS, KEPT, {"dim": (0, 1), "correction": 0}),
    *each([X], "std var_mean", {"dim": 0, "correction": 2.5}),
    of(X, "std", unbiased=False),
    of(CUBE, "var", (0, 2)),
    of((X + 3).bfloat16(), "var", 0, fixed=True),
    of(torch.complex(X, Y), "var", 0),
    of(X, "logsumexp", 0),
    of(X, "logsumexp", (0, 1), keepdim=True),
    of(COUNTS, "logsumexp", 1),
    of(INFINITE, "logsumexp", 0, fixed=True),
    *(
        Case(f"norm {order} {dim}", partial(torch.linalg.vector_norm, ord=order, dim=dim), [X.abs() + 1])
        for order in (0, 0.5, 1, 2, float("inf"), float("-inf"), -1)
        for dim in (None, 0)
    ),
]

PLACES = [
    *each([X, COUNTS, FLAGS, TIED], "max min", ROWS, COLUMNS),
    *each([TIED, ODD, INFINITE, COUNTS], "argmax argmin", {"dim": None}, ROWS, KEPT, fixed=True),
    of(ODD, "max", 0, fixed=True),
    of(INFINITE, "max", 0, keepdim=True, fixed=True),
]

ORDERED = [
    *each([X], "cumsum cumprod logcumsumexp cummax sort argsort median nanmedian mode", ROWS, COLUMNS),
    *each([X], "kthvalue topk", {"k": 2, "dim": 0}, {"k": 2, "dim": 1}),
    of(COUNTS, "cumsum", 0),
    of(X, "median"),
    Case("cumsum_", lambda x: x.cumsum_(0), [X]),
    Case("searchsorted in one", torch.searchsorted, [X.flatten().sort().values, Y], fixed=(0,)),
    Case("searchsorted in many", torch.searchsorted, [X.sort(1).values, normal(5, 3)], fixed=(0,)),
    Case("bucketize", torch.bucketize, [Y, X.flatten().sort().values], fixed=(1,)),
    Case("isin", torch.isin, [COUNTS, integers(3, 4)], fixed=(0, 1)),
]

SOFTMAX = [
    *(of(X, name, dim, grads=True) for name in ("softmax", "log_softmax") for dim in (0, 1)),
    *(of(X.bfloat16(), name, 0, dtype=torch.float32, fixed=True) for name in ("softmax", "log_softmax")),
    *(of(INFINITE, name, 0, fixed=True) for name in ("softmax", "log_softmax")),
    Case("safe softmax", lambda x: torch.ops.aten._safe_softmax(x, 0), [INFINITE], fixed=(0,)),
]

GRADIENTS = [
    of(X, name, dim, grads=True)
    for name in ("sum", "mean", "nansum", "amax", "max", "std", "var", "logsumexp", "sort", "median", "cumsum")
    for dim in (0, 1)
] + [
    of(X, "topk", 2, 0, grads=True),
    *(of(X, name, grads=True) for name in ("sum", "mean", "max", "std")),
    Case("norm", torch.linalg.vector_norm, [X], grads=True),
    Case("norm of rows", partial(torch.linalg.vector_norm, dim=1), [X], grads=True),
]


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize(
    "cases",
    [SUMS, MOMENTS, PLACES, ORDERED, SOFTMAX, GRADIENTS],
    ids=["sums", "moments", "places", "ordered", "softmax", "gradients"],
)
def test_results_and_gradients_are_those_of_plain_tensors(cases: list[Case], mesh_shape: tuple[int, ...]) -> None:
    right(cases, mesh_shape, max_layouts=2)


def moved_by(function: Any, *operands: Any) -> dict[str, int]:
    with CommDebugMode() as comms:
        function(*operands)
    return comms.get_comm_counts()


def test_a_product_of_factors_that_overflow_and_vanish_is_of_the_whole() -> None:
    """Each element is 1, of 1e30 on one rank and 1e-30 on the other; the ranks' own products are inf and 0."""

    def body() -> None:
        factor = 10.0 ** (30 - 60 * disttrain.get_rank())
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.full((3,), factor, dtype=torch.float32), mesh, [Partial("product")])
        torch.testing.assert_close(x.prod().full_tensor(), torch.tensor(1.0))

    run_threads(2, body)


def test_what_moves_is_a_reduced_row_and_no_elements() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (3,))
        x = distribute_tensor(X, mesh, [Shard(0)])
        for reduce in (torch.sum, torch.mean, torch.amax, torch.prod, torch.any, torch.count_nonzero):
            assert moved_by(reduce, x, 0) == moved_by(reduce, x, 1) == {}
        assert x.mean(0).placements == (Partial("sum"),)
        assert x.amax(0).placements == (Partial("max"),)
        assert x.sum(0).sum().placements == (Partial("sum"),)
        assert x.amax(0).amax().placements == (Partial("max"),)
        assert moved_by(torch.softmax, x, 1) == moved_by(torch.argmax, x, 1) == moved_by(torch.var, x, 1) == {}
        assert moved_by(torch.softmax, x, 0) == {"all_reduce": 2}
        assert torch.softmax(x, 0).placements == (Shard(0),)
        assert moved_by(torch.var, x, 0) == {"all_gather_into_tensor": 1}
        assert moved_by(torch.max, x, 0) == {"all_gather_into_tensor": 2}
        assert moved_by(torch.sort, x, 1) == {}
        # The rows are put together, and the columns cut instead.
        assert moved_by(torch.sort, x, 0) == {"all_to_all": 1}

    run_threads(3, body)


def test_a_maximum_passes_its_gradient_to_where_it_came_from() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (3,))
        for function in (lambda x: x.amax((0, 1), keepdim=True), lambda x: x.max(), lambda x: x.amin(0, keepdim=True)):
            plain = TIED.clone().requires_grad_()
            function(plain).backward(torch.ones_like(function(plain)))
            for placement in (Shard(0), Shard(1), Replicate()):
                tensor = distribute_tensor(TIED, mesh, [placement]).requires_grad_()
                result = function(tensor)
                result.backward(distribute_tensor(torch.ones(result.shape, dtype=torch.float64), mesh, [Replicate()]))
                assert tensor.grad is not None
                torch.testing.assert_close(tensor.grad.full_tensor(), plain.grad)

    run_threads(3, body)
