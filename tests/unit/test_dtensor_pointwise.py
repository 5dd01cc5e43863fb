"""Pointwise operators and fills of DTensors in every layout, partial ones above all, judged by plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import disttrain
from disttrain.dtensor import CommDebugMode, DTensor, Partial, Placement, Replicate, Shard
from disttrain.testing import run_threads
from tests.cases.layouts import Case, integers, normal, part, right

MESHES = [(6,), (2, 3), (1, 3), (2, 1)]

X, Y, ROW = normal(5, 4), normal(5, 4, seed=3), normal(4, seed=5)
COUNTS, FLAGS = integers(9, 5, 4) - 3, X > 0
VALUE = torch.tensor(2.0, dtype=torch.float64)


def cases(
    tensors: Sequence[torch.Tensor],
    *functions: Callable[..., Any],
    grads: bool = False,
    partials: Sequence[str] = ("sum", "max", "min"),
) -> list[Case]:
    fixed = [place for place, tensor in enumerate(tensors) if tensor.dtype == torch.bool]
    return [
        Case(f"{place}. of {len(tensors)}", function, tensors, fixed=fixed, grads=grads, partials=partials)
        for place, function in enumerate(functions)
    ]


ACTIVATIONS = (
    torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, F.elu, F.softplus, F.mish, F.hardtanh, F.hardswish,
    F.hardsigmoid, F.softshrink, F.hardshrink, F.leaky_relu, F.logsigmoid, F.selu, F.celu,
)  # fmt: skip

ONE = [
    *cases(
        [X],
        *ACTIVATIONS,
        lambda x: -x,
        lambda x: x * 2.5,
        lambda x: 2 - x,
        lambda x: x / 3,
        torch.deg2rad,
        lambda x: x.float(),
        lambda x: x.long(),
        lambda x: x.bfloat16().float(),
        lambda x: x.bool(),
        lambda x: x // 2,
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: x.mul_(2).add_(1),
        lambda x: x.neg_(),
        torch.frexp,
    ),
    *cases(
        [COUNTS], lambda x: -x, lambda x: x * 2.5, lambda x: x / 3, lambda x: x.double(), lambda x: x + 1, torch.square
    ),
    *cases([X], *ACTIVATIONS, lambda x: x * 2.5, lambda x: x.float(), torch.rad2deg, grads=True, partials=["sum"]),
]  # fmt: skip

LINEAR = (
    torch.add,
    lambda x, y: torch.add(x, y, alpha=3),
    torch.sub,
    torch.mul,
    torch.div,
    lambda x, y: torch.rsub(x, y, alpha=2),
    lambda x, y: x.lerp(y, 0.3),
)

MORE = [
    *cases([X, Y], *LINEAR, torch.maximum, torch.complex, lambda x, y: x.copy_(y), lambda x, y: x.add_(y, alpha=2)),
    *cases([X, Y], lambda x, y: x.mul_(y), lambda x, y: x.lerp_(y, 0.5), torch.floor_divide),
    *cases([X, Y[:1]], *LINEAR),
    *cases([X, Y], *LINEAR, grads=True, partials=["sum"]),
    *cases([X, Y, ROW], torch.addcmul, lambda x, y, z: torch.addcdiv(x, y, z.abs() + 1), torch.lerp),
    *cases([X, Y, ROW], lambda x, y, z: x.addcmul_(y, z, value=0.5)),
    *cases([FLAGS, X, Y], torch.where),
    *cases([FLAGS, X, Y], torch.where, grads=True, partials=["sum"]),
    *cases([FLAGS, X], lambda mask, x: torch.where(mask, x, 0.0), lambda mask, x: x.masked_fill(mask, 0)),
]

FILLS = [
    *cases(
        [X],
        torch.zeros_like,
        torch.ones_like,
        lambda x: torch.full_like(x, 3),
        lambda x: x.new_zeros(5, 4),
        lambda x: x.new_zeros(5, 7),
        lambda x: x.new_zeros(3),
        lambda x: x.new_ones((5, 4), dtype=torch.int64),
        lambda x: x.new_full((5, 4), 2.0),
        lambda x: x.new_empty((5, 6)).fill_(1),
        lambda x: x.new_empty_strided((5, 4), (4, 1)).fill_(1),
        lambda x: x.new_empty_strided((5, 4), (1, 5)).fill_(1),
    ),
    *(
        case
        for kind in ("sum", "max", "min", "product")
        for case in cases([X], lambda x: x.fill_(3), torch.Tensor.zero_, partials=[kind])
        + cases([X, VALUE], torch.Tensor.fill_, partials=[kind])
    ),
]


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("family", [ONE, MORE, FILLS], ids=["one operand", "more operands", "fills"])
def test_results_and_gradients_are_those_of_plain_tensors(family: list[Case], mesh_shape: tuple[int, ...]) -> None:
    right(family, mesh_shape, max_layouts=2)


def test_what_is_linear_stays_partial() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))

        def laid(tensor: torch.Tensor, placement: Placement) -> DTensor:
            return part(tensor, [placement], mesh)

        x, y, mask = laid(X, Partial()), laid(Y, Replicate()), laid(FLAGS, Replicate())
        with CommDebugMode() as comms:
            linear = (x + x, x - x, -x, x * 2.0, x * y, y * x, x / y, x.lerp(x, 0.5), x.addcmul(x, y), x + y, x.clone())
            linear += (torch.where(mask, x, y), x.masked_fill(mask, 0.0), torch.ops.aten.threshold_backward(x, y, 0.0))
            linear += (laid(X.float(), Partial()).double(), x.fill_(2.0), x.zero_(), x.cumsum(0))
            assert {result.placements for result in linear} == {(Partial("sum"),)}
            assert (-laid(X, Partial("max"))).placements == (Partial("min"),)
            assert torch.ones_like(x).placements == x.new_zeros(5, 4).placements == (Replicate(),)
            assert laid(X, Shard(0)).new_zeros(5, 9).placements == (Shard(0),)
            assert laid(X, Shard(0)).new_zeros(9, 4).placements == (Replicate(),)
        assert comms.get_comm_counts() == {}
        # Numbers that a narrower type rounds are added up first.
        for result in (x + 1, x.sqrt(), x.bfloat16(), x.masked_fill(mask, 1.0)):
            assert not result.placements[0].is_partial()

    run_threads(2, body)
