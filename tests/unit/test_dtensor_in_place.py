"""Writing to DTensors in place, however they lie: the tensor keeps its layout and memory, and has the plain result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from disttrain.dtensor import DTensor
from tests.cases.shardings import check, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")

# Four ranks leave one without rows; of two and of three there are axes beside one of a single rank.
MESHES = ((4,), (2, 2), (1, 3), (2, 1))

X, Y, ROW, COLUMN = normal(5, 3), normal(5, 3, seed=1), normal(3, seed=2), normal(5, seed=3)
ROWS = torch.tensor([4, 0, 1])
LEFT, RIGHT = normal(5, 4, seed=4), normal(4, 3, seed=5)

Write = Callable[..., torch.Tensor]

WRITES: dict[str, tuple[Write, list[torch.Tensor]]] = {
    "fill": (lambda x: x.fill_(3.0), [X]),
    "fill by a tensor": (lambda x, v: x.fill_(v), [X, normal()]),
    "zero": (lambda x: x.zero_(), [X]),
    "add a number": (lambda x: x.add_(1), [X]),
    "subtract a number": (lambda x: x.sub_(1.5), [X]),
    "add": (lambda x, y: x.add_(y, alpha=2), [X, Y]),
    "add a row": (lambda x, y: x.add_(y), [X, ROW]),
    "multiply": (lambda x, y: x.mul_(y), [X, Y]),
    "divide by a number": (lambda x: x.div_(2), [X]),
    "bound": (lambda x: x.clamp_(-0.5, 0.5), [X]),
    "relu": (lambda x: x.relu_(), [X]),
    "copy": (lambda x, y: x.copy_(y), [X, Y]),
    "copy a row": (lambda x, y: x.copy_(y), [X, ROW]),
    "lerp": (lambda x, y: x.lerp_(y, 0.3), [X, Y]),
    "addcmul": (lambda x, y, z: x.addcmul_(y, z, value=2), [X, Y, X]),
    "addmv": (lambda x, m, v: x.addmv_(m, v, beta=0.5, alpha=2), [COLUMN, LEFT, normal(4, seed=6)]),
    "addmm": (lambda x, m, n: x.addmm_(m, n, beta=0.5, alpha=2), [X, LEFT, RIGHT]),
    "addr": (lambda x, a, b: x.addr_(a, b, beta=0.5), [X, COLUMN, ROW]),
    "add rows": (lambda x, i, y: x.index_add_(0, i, y, alpha=2), [X, torch.tensor([4, 0, 0]), normal(3, 3)]),
    "copy rows": (lambda x, i, y: x.index_copy_(0, i, y), [X, ROWS, normal(3, 3)]),
    "fill rows": (lambda x, i: x.index_fill_(0, i, 3.0), [X, ROWS]),
    "put rows": (lambda x, i, y: x.index_put_((i,), y), [X, ROWS, normal(3, 3)]),
    "fill by a mask": (lambda x, mask: x.masked_fill_(mask, 3.0), [X, X > 0]),
    "running sum": (lambda x: x.cumsum_(0), [X]),
    "lower triangle": (lambda x: x.tril_(), [X]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_there_in_every_layout(name: str) -> None:
    write, operands = WRITES[name]

    def written(x: torch.Tensor, *others: torch.Tensor) -> Any:
        tensor = x * 1
        memory = tensor.detach()
        layout = tensor.placements if isinstance(tensor, DTensor) else None
        assert write(tensor, *others) is tensor
        if isinstance(tensor, DTensor):
            assert tensor.placements == layout
        return tensor, memory

    check(written, *operands, meshes=MESHES, num_choices=5, gradients=True)
