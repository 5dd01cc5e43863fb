"""The gradient of an input that several linear layers share."""

from __future__ import annotations

import pytest
import torch

from disttrain.tp.layers.linears import Matrix, input_grad


@pytest.mark.parametrize("widths", [[3], [4, 2, 2], [2, 6, 5], [8, 8]])
@pytest.mark.parametrize("out_dims", [[0, 0, 0], [1, 1, 1], [1, 0, 1]])
def test_it_is_the_sum_of_what_each_layer_gives(widths: list[int], out_dims: list[int]) -> None:
    torch.manual_seed(0)
    out_dims = out_dims[: len(widths)]
    x = torch.randn(5, 8, requires_grad=True, dtype=torch.float64)
    shapes = [(width, 8) if out_dim == 0 else (8, width) for width, out_dim in zip(widths, out_dims, strict=True)]
    weights = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    grads = [torch.randn(5, width, dtype=torch.float64) for width in widths]
    matrices = [Matrix(out_dim) for out_dim in out_dims]
    for matrix, weight, grad in zip(matrices, weights, grads, strict=True):
        matrix.times(x, weight, None).backward(grad)
    torch.testing.assert_close(input_grad(matrices, grads, weights), x.grad)
