"""What is written in place to a tensor of which each rank holds a term: every operator that writes, every kind of term.

Such a tensor keeps its placement, so that others that share its memory see what has been written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, implicit_replication
from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.spec.placement import NormPartial
from disttrain.testing import run_threads
from tests.cases.shardings import mesh_of
from tests.cases.writes import KINDS, arguments, in_parts, writing_operators
from tests.dtensor_ops.judge import _RankRandom

pytestmark = pytest.mark.filterwarnings("ignore")


def a_whole(kind: Partial) -> torch.Tensor:
    whole = torch.rand(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4 - 2
    return whole.abs() + 0.1 if isinstance(kind, NormPartial) else whole


def replaced(values: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(values, torch.Tensor):
        return change(values)
    return [replaced(value, change) for value in values] if isinstance(values, list) else values


def plain_results(kind: Partial) -> dict[OpOverload, torch.Tensor]:
    """By operator, what is there after it; those that torch refuses are left out."""
    results = {}
    for op in writing_operators():
        whole = a_whole(kind)
        made = arguments(op, whole)
        if made is None:
            continue
        try:
            op(*replaced(made[0], lambda tensor, whole=whole: whole if tensor is whole else tensor.clone()), **made[1])
        except (RuntimeError, NotImplementedError, ZeroDivisionError, IndexError, ValueError):
            continue
        results[op] = whole
    return results


def has_others(op: OpOverload, kind: Partial) -> bool:
    """Whether it takes another tensor that may lie as the one that is written."""
    whole = a_whole(kind)
    return any(_is_like(value, whole) for value in tree_leaves(arguments(op, whole)))


def _is_like(value: Any, whole: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value is not whole
        and (value.dtype, value.shape) == (torch.float64, whole.shape)
    )


def faults(
    op: OpOverload,
    kind: Partial,
    wanted: torch.Tensor,
    mesh: Any,
    others_are_partial: bool,
    placements: Sequence[Placement] = (),
) -> list[str]:
    whole = a_whole(kind)
    made = arguments(op, whole)
    assert made is not None
    tensor = in_parts(whole, kind, mesh, placements)
    sharing = tensor.detach()

    def laid(value: torch.Tensor) -> Any:
        if value is whole:
            return tensor
        if others_are_partial and _is_like(value, whole):
            return in_parts(value, kind, mesh, placements)
        return distribute_tensor(value, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)

    note = f"{op} on {kind}, others {'alike' if others_are_partial else 'whole'}"
    try:
        op(*replaced(made[0], laid), **replaced(made[1], laid))
    except Exception as error:  # noqa: BLE001 -- all that went wrong is told at once
        return [f"{note}: {type(error).__name__}: {error}"]
    found = [("it", tensor.full_tensor()), ("what shares its memory", sharing.full_tensor())]
    assert tensor.placements == (tuple(placements) or (kind,))
    return [
        f"{note}: {what} is {value.tolist()} instead of {wanted.tolist()}"
        for what, value in found
        if not torch.allclose(value, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)
    ]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_operator_that_writes(kind: Partial) -> None:
    expected = plain_results(kind)
    assert len(expected) > 190

    def body() -> list[str]:
        mesh = mesh_of((2,))
        return [
            fault
            for op, wanted in expected.items()
            for others_are_partial in (False, True)[: 1 + (not isinstance(kind, NormPartial) and has_others(op, kind))]
            for fault in faults(op, kind, wanted, mesh, others_are_partial)
        ]

    assert run_threads(2, body) == [[], []]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("kind", "mesh_shape"),
    [(KINDS[place], ((2, 1), (1, 2))[number % 2]) for number, place in enumerate((0, 0, 1, 2, 3, 7))],
    ids=str,
)
def test_every_operator_that_writes_on_axes_of_one_rank(kind: Partial, mesh_shape: tuple[int, int]) -> None:
    expected = plain_results(kind)

    def body() -> list[str]:
        mesh = mesh_of(mesh_shape)
        return [
            fault
            for op, wanted in expected.items()
            for fault in faults(op, kind, wanted, mesh, False, (Shard(0), kind))
        ]

    assert run_threads(2, body) == [[], []]


def set_rows(x: Any, value: Any) -> None:
    x[1:3] = value


def set_where(x: Any) -> None:
    x[x > 0] = -3.0


WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda x: x.__setitem__(0, -3.0),
    "rows": lambda x: set_rows(x, 5.0),
    "where": set_where,
    "a list of rows": lambda x: x.__setitem__(torch.tensor([0, 1]), -1.0),
    "a view of a view": lambda x: x.view(-1)[2:5].neg_(),
    "a transposed view": lambda x: x.t().mul_(-2),
    "a column from another": lambda x: x[:, 0].copy_(x[:, 1].clone()),
    "data": lambda x: x.data.neg_(),
    "out of a sum": lambda x: torch.add(x.clone(), 1, out=x),
    "out of a power": lambda x: torch.exp(x.clone(), out=x),
    "out of a product": lambda x: torch.mm(x.new_ones(4, 4), x.clone(), out=x),
    "out of a concatenation": lambda x: torch.cat([x[:2].clone(), -x[:2]], out=x),
    "even numbers": lambda x: x.uniform_(),
    "normal numbers": lambda x: x.normal_(),
    "coins": lambda x: x.bernoulli_(0.5),
    "whole numbers": lambda x: x.random_(0, 10),
    "long waits": lambda x: x.exponential_(),
    "dropout": lambda x: functional.dropout(x, 0.5, True, True),
    "random slopes": lambda x: functional.rrelu(x, training=True, inplace=True),
    "relu": lambda x: functional.relu(x, inplace=True),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kinds", [KINDS[:5], KINDS[5:]], ids=["terms", "norms"])
def test_other_ways_to_write(kinds: Sequence[Partial], num_ranks: int) -> None:
    def body() -> None:
        mesh = mesh_of((num_ranks,))
        for name, write in WRITES.items():
            for kind in kinds:
                plain, tensor = a_whole(kind), in_parts(a_whole(kind), kind, mesh)
                sharing = tensor.detach()
                with _RankRandom() as mode, implicit_replication():
                    mode._seed(5)
                    write(plain)
                    mode._seed(5)
                    write(tensor)
                for found in (tensor, sharing):
                    torch.testing.assert_close(
                        found.full_tensor(), plain, msg=lambda text, note=f"{name}, {kind}": f"{note}: {text}"
                    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_threads(num_ranks, body)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("order", [0.5, 2, 3, float("inf")])
def test_what_is_written_to_a_norm_over_several_axes(order: float, mesh_shape: tuple[int, int]) -> None:
    whole = torch.arange(1.0, 41.0, dtype=torch.float64).view(4, 5, 2)

    def body() -> None:
        mesh = mesh_of(mesh_shape)
        for dtype in (torch.float64, torch.float32):
            for value in (-2.0, 3e30, -3e30, float("-inf"), float("nan")):
                given = distribute_tensor(whole.to(dtype), mesh, [Shard(0), Shard(1)], src_data_rank=None)
                norm = torch.linalg.vector_norm(given, order, (0, 1))
                assert any(placement.is_partial() for placement in norm.placements)
                plain = torch.linalg.vector_norm(whole.to(dtype), order, (0, 1))
                norm[0], plain[0] = value, value
                torch.testing.assert_close(norm.full_tensor(), plain, equal_nan=True)
                torch.testing.assert_close(norm.neg_().abs().full_tensor(), plain.abs(), equal_nan=True)
                if dtype == torch.float64:
                    again, wanted = torch.linalg.vector_norm(norm, order), torch.linalg.vector_norm(plain, order)
                    torch.testing.assert_close(again.full_tensor(), wanted, equal_nan=True)

    run_threads(torch.Size(mesh_shape).numel(), body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_averages_of_the_largest_numbers(num_ranks: int, dtype: torch.dtype) -> None:
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    given = torch.tensor([float("inf"), float("-inf"), largest, -largest, 0.0, smallest * 1.5], dtype=dtype)

    def body() -> None:
        mesh = mesh_of((num_ranks,))
        for write in (torch.Tensor.nan_to_num_, lambda x: x.clamp_max_(largest), lambda x: x.nextafter_(-x)):
            tensor, plain = DTensor.from_local(given.clone(), mesh, [Partial("avg")]), given.clone()
            if dtype == torch.float16 and write is not torch.Tensor.nan_to_num_:
                continue
            write(plain)
            write(tensor)
            torch.testing.assert_close(tensor.full_tensor(), plain)
            scattered = tensor.redistribute(placements=[Shard(0)])
            torch.testing.assert_close(scattered.full_tensor(), plain)

    run_threads(num_ranks, body)
