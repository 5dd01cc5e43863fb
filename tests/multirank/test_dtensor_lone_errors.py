"""What one rank alone finds wrong in its part: the others learn it, and don't wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard
from disttrain.errors import BackendError, CollectiveMismatchError, GroupError
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks

Lookup = Callable[[DTensor, DTensor], torch.Tensor]

LOOKUPS: dict[str, Lookup] = {
    "embedding": lambda table, places: functional.embedding(places, table),
    "gather": lambda table, places: table.gather(0, places.unsqueeze(1)),
    "index": lambda table, places: table[places],
    "index_select": lambda table, places: table.index_select(0, places),
    "take": lambda table, places: table.take(places),
    "nll_loss": lambda table, places: functional.nll_loss(table[:2].repeat(2, 1), places, reduction="none"),
}
NUM_ROWS, NUM_PLACES = 4, 4


def looked_up(lookup: Lookup, mesh: disttrain.DeviceMesh) -> torch.Tensor:
    """Of places of which the last rank along the first axis has one that is not there; then all ranks meet."""
    table = disttrain.dtensor.distribute_tensor(torch.randn(NUM_ROWS, NUM_ROWS), mesh, [Replicate()] * mesh.ndim)
    places = torch.arange(NUM_PLACES)
    places[-1] = 1000
    cut = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    return lookup(table, disttrain.dtensor.distribute_tensor(places, mesh, cut)).sum().full_tensor()


@on_ranks(2)
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_others_learn_of_a_place_that_is_not_there(name: str) -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,))
    disttrain.barrier()
    began_s = time.monotonic()
    if disttrain.get_rank() == 1:
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            looked_up(LOOKUPS[name], mesh)
    else:
        with pytest.raises((CollectiveMismatchError, GroupError), match=r"rank 1 refused aten.*out of (range|bounds)"):
            looked_up(LOOKUPS[name], mesh)
    assert time.monotonic() - began_s < 40


@on_ranks(4)
def test_word_of_it_crosses_a_mesh() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2))
    disttrain.barrier()
    began_s = time.monotonic()
    lookup = LOOKUPS["embedding"]
    if disttrain.get_rank() < 2:
        with pytest.raises((BackendError, GroupError), match="refused aten"):
            looked_up(lookup, mesh)
    else:
        with pytest.raises(IndexError):
            looked_up(lookup, mesh)
    assert time.monotonic() - began_s < 40


@on_ranks(2)
def test_who_mends_it_at_once_goes_on() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,))
    table = torch.arange(4.0).unsqueeze(1)
    own = torch.tensor([3 if disttrain.get_rank() == 0 else 1000])
    places = DTensor.from_local(own, mesh, [Shard(0)])
    weight = DTensor.from_local(table, mesh, [Replicate()])
    try:
        rows = functional.embedding(places, weight)
    except IndexError:
        rows = DTensor.from_local(torch.ones(1, 1), mesh, [Shard(0)])
    assert rows.sum().item() == 4


@pytest.mark.parametrize("name", LOOKUPS)
def test_ranks_that_are_threads_do_not_wait_either(name: str) -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        run_threads(2, lambda: looked_up(LOOKUPS[name], disttrain.init_device_mesh("cpu", (2,))))


@on_ranks(2)
def test_an_error_of_another_kind_stays_what_it_is() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,))
    ones = disttrain.dtensor.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    disttrain.barrier()
    if disttrain.get_rank() == 1:
        broken = AttributeError("'Spec' object has no attribute 'colour'")
        with (
            patch("disttrain.dtensor.dtensor.dispatch", side_effect=broken),
            pytest.raises(AttributeError, match="colour") as caught,
        ):
            ones + 1
        assert not hasattr(caught.value, "__notes__")
    else:
        with pytest.raises((CollectiveMismatchError, GroupError), match=r"rank 1 refused aten.*colour") as told:
            disttrain.all_reduce(torch.ones(1))
        assert "belongs there" not in str(told.value)
