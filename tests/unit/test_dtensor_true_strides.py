"""Strides of results are those that the device's kernels give, where torch's meta kernels say others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.testing import run_threads
from tests.cases.layouts import normal

KERNELS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "logsigmoid": ((6, 4), lambda x: functional.logsigmoid(x.t())),
    "batch_norm": ((4, 4, 6), lambda x: functional.batch_norm(x.transpose(1, 2), None, None, training=True)),
    "layer_norm of a column": ((4, 1, 4), lambda x: functional.layer_norm(x.permute(0, 2, 1), (4, 1))),
    "log_softmax": ((4, 4, 1), lambda x: torch.log_softmax(x.transpose(0, 1).transpose(0, 1).permute(2, 0, 1), 2)),
    "svd": ((4, 4, 4), lambda x: torch.linalg.svd(x).U),
    "fft": ((4, 4, 6), torch.fft.rfft2),
}


# A cut batch is normed, and a softmax over a cut dim taken, by other kernels than plain tensors are; a cut dim that is
# normed is gathered first.
BY_OTHERS = [
    ("batch_norm", Shard(0)),
    ("batch_norm", Shard(1)),
    ("layer_norm of a column", Shard(1)),
    ("log_softmax", Shard(1)),
]
CASES = [
    (name, placement)
    for name in KERNELS
    for placement in (Replicate(), Shard(0), Shard(1))
    if (name, placement) not in BY_OTHERS
]


@pytest.mark.parametrize(("name", "placement"), CASES, ids=str)
def test_strides_are_the_kernels_own(name: str, placement: Placement) -> None:
    shape, kernel = KERNELS[name]
    tensor = normal(*shape)
    expected = kernel(tensor)

    def body() -> None:
        x = distribute_tensor(tensor, disttrain.init_device_mesh("cpu", (2,)), [placement], src_data_rank=None)
        for _ in range(2):
            assert kernel(x).stride() == expected.stride()

    run_threads(2, body)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_they_are_where_ranks_have_too_few_elements_to_show_them(world: int) -> None:
    """7 elements over 3 ranks leave 1 for the last, over 4 too; a part's order of dims is seen by none alike."""
    tensor, few = normal(7, 5), normal(2, 7)

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (world,))
        for whole in (tensor, few):
            for placement in (Shard(0), Shard(1)):
                x = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                result = functional.logsigmoid(x.t())
                assert result.stride() == functional.logsigmoid(whole.t()).stride()
                torch.testing.assert_close(
                    result.view(-1).full_tensor(), functional.logsigmoid(whole.t()).view(-1), rtol=0, atol=0
                )

    run_threads(world, body)


def test_what_plain_tensors_may_be_viewed_as_dtensors_may() -> None:
    tensor, rows, weight = normal(6, 4), normal(2, 1, 3), normal(3, 1)

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x, r, w = (distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in (tensor, rows, weight))
        assert functional.logsigmoid(x.t()).view(-1).shape == (24,)
        normed = functional.layer_norm(r.permute(0, 2, 1), (3, 1), w, w)
        expected = functional.layer_norm(rows.permute(0, 2, 1), (3, 1), weight, weight)
        torch.testing.assert_close(torch.kron(normed, r).full_tensor(), torch.kron(expected, rows))

    run_threads(2, body)


def test_a_product_of_what_has_to_move_is_viewed_wherever_its_parts_lie() -> None:
    column = normal(2, 1)

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (1,))
        x = DTensor.from_local(column, mesh, [Partial("product")])
        torch.testing.assert_close(
            torch.kron(x, DTensor.from_local(column, mesh, [Shard(1)])).full_tensor(), torch.kron(column, column)
        )

    run_threads(1, body)
