"""Convolutions, forward and backward, of images, kernels and biases cut along any dim: channels, space, taps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from disttrain.dtensor import Replicate, Shard, distribute_tensor
from disttrain.testing import run_threads
from tests.cases.shardings import check, mesh_of, normal

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


# Of axes of three ranks there is one beside an axis of a single rank.
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2), (1, 3)])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_values_and_gradients(name: str, mesh_shape: tuple[int, ...]) -> None:
    function, operands = CONVOLUTIONS[name]
    check(function, *operands, meshes=(mesh_shape,), num_choices=8, gradients=True)


def test_sizes_that_leave_nothing_are_taken_or_refused_by_all_ranks() -> None:
    """torch's own ways to compute differ in that, by the dtype and the size of the batch."""
    image, kernel = normal(2, 1, 2, 1, 2, dtype=torch.float32), normal(1, 1, 1, 2, 1, dtype=torch.float32)
    expected = functional.conv_transpose3d(image, kernel, padding=1, dilation=2)

    def body() -> None:
        x = distribute_tensor(image, mesh_of((3,)), [Shard(0)], src_data_rank=None).requires_grad_()
        weight = distribute_tensor(kernel, mesh_of((3,)), [Replicate()], src_data_rank=None).requires_grad_()
        result = functional.conv_transpose3d(x, weight, padding=1, dilation=2)
        assert result.full_tensor().shape == expected.shape
        result.sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.zeros_like(image))
        assert torch.equal(weight.grad.full_tensor(), torch.zeros_like(kernel))

    run_threads(3, body)


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_an_empty_batch_is_resized() -> None:
    """torch's kernel for shapes alone refuses it, by a check that is given a number."""

    def body() -> None:
        x = distribute_tensor(normal(6, 1, 2)[:0], mesh_of((2,)), [Shard(0)], src_data_rank=None)
        assert functional.interpolate(x, size=(3,), mode="nearest").full_tensor().shape == (0, 1, 3)

    run_threads(2, body)
