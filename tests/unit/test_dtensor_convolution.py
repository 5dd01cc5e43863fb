"""Convolutions, forward and backward, of images, kernels and biases cut along any dim: channels, space, taps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.sharding_cases import check, normal

IMAGES, LINES = normal(3, 4, 5, 5), normal(3, 3, 7)

CONVOLUTIONS: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "lines": (functional.conv1d, [LINES, normal(5, 3, 2), normal(5)]),
    "one line without a batch": (functional.conv1d, [LINES[0], normal(5, 3, 2), normal(5)]),
    "images": (lambda x, w, b: functional.conv2d(x, w, b, padding=1), [IMAGES, normal(6, 4, 3, 3), normal(6)]),
    "strides and gaps": (
        lambda x, w, b: functional.conv2d(x, w, b, stride=2, dilation=2, padding=2),
        [IMAGES, normal(6, 4, 3, 3), normal(6)],
    ),
    "groups": (lambda x, w, b: functional.conv2d(x, w, b, groups=2), [IMAGES, normal(6, 2, 3, 3), normal(6)]),
    "each channel": (lambda x, w: functional.conv2d(x, w, groups=4), [IMAGES, normal(8, 1, 3, 3)]),
    "transposed": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        [IMAGES, normal(4, 3, 3, 3), normal(3)],
    ),
    "volumes": (functional.conv3d, [normal(1, 2, 3, 3, 3), normal(3, 2, 2, 2, 2), normal(3)]),
    "a border that goes round": (
        lambda x, w: functional.conv1d(functional.pad(x, (1, 1), mode="circular"), w),
        [LINES, normal(4, 3, 3)],
    ),
}


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2), (1, 3)])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_values_and_gradients(name: str, mesh_shape: tuple[int, ...]) -> None:
    function, operands = CONVOLUTIONS[name]
    check(function, *operands, meshes=(mesh_shape,), num_choices=12, gradients=True)
