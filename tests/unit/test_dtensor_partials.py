"""Tensors of which each rank holds a term, in several ways at once: sums, averages, extrema, products."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttrain
from disttrain.dtensor import DTensor, Partial, Replicate, Shard
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from tests.cases.shardings import mesh_of

PAIRS = (("sum", "max"), ("avg", "sum"), ("max", "min"), ("sum", "avg"), ("product", "sum"))

OF_ONE: dict[str, Callable[[Any], Any]] = {
    "plus a number": lambda x: x + 1,
    "times a number": lambda x: x * 2,
    "times less than nothing": lambda x: x * -2.0,
    "negative": torch.neg,
    "twice": lambda x: x + x,
    "square": lambda x: x * x,
    "sum": torch.sum,
    "largest": torch.max,
    "relu": torch.relu,
    "half": lambda x: x / 2,
    "bound": lambda x: x.clamp(min=0),
    "written to": lambda x: x.clone().mul_(-3.0).add_(1),
    "filled": lambda x: x.clone().fill_(2.0),
    "exponential": torch.exp,
    "repeated": lambda x: torch.cat([x, x]),
    "stacked": lambda x: torch.stack([x, x]),
}
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "sum": torch.add,
    "difference": torch.sub,
    "product": torch.mul,
    "larger": torch.maximum,
    "smaller": torch.minimum,
    "one after the other": lambda x, y: torch.cat([x, y]),
    "stacked": lambda x, y: torch.stack([x, y]),
    "chosen": lambda x, y: torch.where(x > y, x, y),
    "added to": lambda x, y: x.clone().add_(y),
    "copied to": lambda x, y: x.clone().copy_(y),
    "dot": torch.dot,
}


def terms(mesh: DeviceMesh, values: list[float], *reduce_ops: str) -> DTensor:
    """Each rank's term is another multiple of `values`; along the axes they are reduced by `reduce_ops`."""
    part = torch.tensor(values) * (disttrain.get_rank() + 1)
    return DTensor.from_local(part, mesh, [Partial(reduce_op) for reduce_op in reduce_ops])


@pytest.mark.parametrize("reduce_ops", PAIRS)
def test_what_is_computed_with_them_is_the_values(reduce_ops: tuple[str, str]) -> None:
    def body() -> None:
        mesh = mesh_of((2, 2))
        x, y = terms(mesh, [1.0, -2.0], *reduce_ops), terms(mesh, [3.0, -1.0], *reduce_ops[::-1])
        wholes = [x.full_tensor(), y.full_tensor()]
        for name, function in OF_ONE.items():
            compare(name, function(x), function(wholes[0]))
        for name, both in OF_TWO.items():
            compare(name, both(x, y), both(*wholes))
        for placements in ([Shard(0), Shard(0)], [Shard(0), Replicate()], [Replicate(), Shard(0)]):
            compare(str(placements), x.redistribute(placements=placements), wholes[0])
        assert x.tolist() == wholes[0].tolist()

    run_threads(4, body)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("reduce_ops", PAIRS)
def test_two_ways_meet_along_one_axis(reduce_ops: tuple[str, str], num_ranks: int) -> None:
    def body() -> None:
        mesh = mesh_of((num_ranks,))
        x, y = terms(mesh, [1.0, -2.0], reduce_ops[0]), terms(mesh, [3.0, -1.0], reduce_ops[1])
        wholes = [x.full_tensor(), y.full_tensor()]
        for name, both in OF_TWO.items():
            compare(name, both(x, y), both(*wholes))

    run_threads(num_ranks, body)


def test_values_survive_from_any_mixture_to_any_other() -> None:
    """A third of all ways, in which any three of the four placements meet."""
    kinds = [Replicate(), Shard(0), *map(Partial, ("sum", "avg", "max", "product"))]

    def body() -> None:
        mesh = mesh_of((2, 2))
        for source in itertools.product(kinds, repeat=2):
            begin = [placement if placement.is_partial() else Replicate() for placement in source]
            offset = sum(10**axis * mesh.get_local_rank(axis) for axis in (0, 1) if source[axis].is_partial())
            tensor = DTensor.from_local(torch.tensor([1.0, -2.0, 3.0]) + offset, mesh, begin)
            tensor = tensor.redistribute(placements=source)
            whole = tensor.full_tensor()
            for target in itertools.product(kinds, repeat=2):
                if sum(map(kinds.index, (*source, *target))) % 3:
                    continue
                compare(f"{source} to {target}", tensor.redistribute(placements=target), whole)

    run_threads(4, body)


def compare(name: str, found: DTensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.full_tensor(), expected, msg=lambda text: f"{name}: {text}")
