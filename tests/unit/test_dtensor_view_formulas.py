"""Shapes and strides of views by formulas, beside torch's kernels for the meta device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from disttrain.dtensor.dispatch.sizes.view_formulas import _FORMULAS, views_of


def drawn_arguments(op: Any, shape: list[int], draw: random.Random) -> list[Any]:
    """Arguments of which some are mistakes."""
    num_dims = len(shape)
    dim = draw.randint(-num_dims - 1, num_dims)
    size = shape[dim] if -num_dims <= dim < num_dims else 3
    name = str(op).removeprefix("aten.")
    if name == "permute":
        return [draw.sample(range(num_dims), num_dims)]
    if name == "split_with_sizes.default":
        first = draw.randint(0, size)
        return [[first, size - first], dim]
    if name == "expand.default":
        sizes = [draw.choice([length, length, -1, 3 if length == 1 else length]) for length in shape]
        return [[*[draw.choice([1, 2, 3, -1, 0]) for _ in range(draw.randint(0, 2))], *sizes[draw.random() < 0.1 :]]]
    return {
        "permute.default": [[each - draw.choice([0, num_dims]) for each in draw.sample(range(num_dims), num_dims)]],
        "select.int": [dim, draw.randint(-size, size)],
        "slice.Tensor": [
            *(dim, draw.choice([None, 0, 1, -2, 9]), draw.choice([None, 2, -1, 2**63 - 1]), draw.randint(1, 3))
        ],
        "split.Tensor": [draw.randint(1, 4), dim],
        "transpose.int": [dim, draw.randint(-num_dims, num_dims - 1) if num_dims else 0],
        "unsqueeze.default": [dim],
    }.get(name, [])


@pytest.mark.parametrize("op", _FORMULAS, ids=str)
def test_a_formula_is_as_torch(op: Any) -> None:
    draw, num_known = random.Random(str(op)), 0
    for _ in range(300):
        shape = [draw.randint(0 if draw.random() < 0.1 else 1, 5) for _ in range(draw.randint(0, 4))]
        stride = [draw.randint(0, 40) for _ in shape]
        args = drawn_arguments(op, shape, draw)
        found = views_of(op, shape, stride, args)
        try:
            results = op(torch.empty_strided(shape, stride, device="meta"), *args)
        except (IndexError, RuntimeError):
            assert found is None, (shape, args)
            continue
        if found is None:
            continue
        num_known += 1
        results = results if isinstance(results, list | tuple) else [results]
        assert found == [(tuple(each.shape), each.stride()) for each in results], (shape, stride, args)
    assert num_known > 50
