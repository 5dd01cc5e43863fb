"""A rank of a job whose other ranks are played: there at once, whatever the size of the job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import disttrain
from disttrain.errors import GroupError, RendezvousError
from disttrain.process_group import new_group
from disttrain.store import HashStore


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    if disttrain.is_initialized():
        disttrain.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_it_waits_for_nobody() -> None:
    disttrain.init_process_group("fake", world_size=64)
    assert (disttrain.get_rank(), disttrain.get_world_size()) == (0, 64)
    gathered = torch.zeros(64, 3)
    disttrain.all_gather_into_tensor(gathered, torch.ones(3))
    assert gathered.sum() == 192
    half = new_group(list(range(32)))
    assert isinstance(half, disttrain.ProcessGroup)
    assert half.group_size == 32


def test_the_rank_and_the_store_may_be_given() -> None:
    store = HashStore()
    disttrain.init_process_group("cpu:fake", store=store, rank=5, world_size=8, timeout=1)
    assert (disttrain.get_rank(), disttrain.get_world_size()) == (5, 8)


def test_a_size_is_needed_that_the_rank_fits_in() -> None:
    with pytest.raises(RendezvousError, match="WORLD_SIZE is not set"):
        disttrain.init_process_group("fake")
    with pytest.raises(RendezvousError, match="rank 8 of world size 8 cannot be"):
        disttrain.init_process_group("fake", rank=8, world_size=8)


def test_a_group_that_was_aborted_is_nobodys_any_more() -> None:
    disttrain.init_process_group("fake", world_size=4)
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    aborted = mesh.get_group("tp")
    for _ in range(2):
        disttrain.abort_process_group(aborted)
    with pytest.raises(GroupError, match="has been destroyed"):
        disttrain.barrier(aborted)
    again = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert again != mesh
    disttrain.barrier(again.get_group("tp"))
