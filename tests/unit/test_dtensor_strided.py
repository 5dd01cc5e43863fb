"""as_strided counts places in memory: right where a DTensor knows them, refused on all ranks where it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from disttrain.dtensor import Placement, Replicate, Shard
from disttrain.errors import LayoutError
from disttrain.testing import run_threads
from tests.cases.shardings import check, laid_out, mesh_of, normal

pytestmark = pytest.mark.filterwarnings("ignore:disttrain.dtensor:UserWarning")

WHOLE = normal(6, 4)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x[2:],
    "a row": lambda x: x[3],
    "flat": lambda x: x.view(-1)[5:],
    "rows, detached": lambda x: x[2:].detach(),
}


@pytest.mark.parametrize("offset", [None, 0, 3])
def test_of_a_tensor_that_is_no_view(offset: int | None) -> None:
    check(lambda x: x.as_strided((2, 3), (4, 1), offset), WHOLE, gradients=True)
    check(lambda x: torch.as_strided_copy(x, (2, 3), (4, 1), offset), WHOLE)
    check(lambda x, y: torch.as_strided_scatter(x, y, (2, 3), (4, 1), offset), WHOLE, normal(2, 3))


def test_without_an_offset_a_view_counts_from_its_own_start() -> None:
    check(lambda x: x[2:].as_strided((2, 2), (1, 4)), WHOLE, gradients=True)
    check(lambda x: x[2:].as_strided((4, 4), (4, 1)), WHOLE)


@pytest.mark.parametrize("layout", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("offset", [0, 1])
def test_with_an_offset_a_view_is_refused_on_all_ranks(name: str, layout: Placement, offset: int) -> None:
    def body() -> None:
        view = VIEWS[name](laid_out(WHOLE, mesh_of((3,)), [layout]))
        size, stride = view.shape, view.stride()
        shorter = (size[0] - 1, *size[1:])
        calls = (
            lambda: view.as_strided(shorter, stride, offset),
            lambda: torch.as_strided_copy(view, shorter, stride, offset),
            lambda: torch.as_strided_scatter(view, view[1:], shorter, stride, offset),
        )
        for call in calls:
            with pytest.raises(LayoutError, match="storage_offset counts from the start"):
                call()

    run_threads(3, body)
