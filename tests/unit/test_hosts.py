"""A group knows whether its ranks are on several hosts, alike on all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from disttrain.process_group import World
from disttrain.process_group.joining.hosts import leaves_host, tell_host
from disttrain.store import HashStore


def worlds(host_of: Callable[[int], str], num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """Of ranks that have told where they are."""
    store = HashStore()
    made = []
    for rank in range(num_ranks):
        world = World(store, rank, num_ranks, backend="fake", timeout_s=5.0, device=torch.device("cpu"))
        monkeypatch.setenv("NCCL_HOSTID", host_of(rank))
        tell_host(world)
        made.append(world)
    return made


def test_ranks_of_one_host_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(leaves_host(world.default_group) for world in worlds(lambda _: "a", 3, monkeypatch))


def test_groups_within_hosts_and_across(monkeypatch: pytest.MonkeyPatch) -> None:
    for world in worlds(lambda rank: "ab"[rank // 2], 4, monkeypatch):
        inside = (0, 1) if world.rank < 2 else (2, 3)
        assert leaves_host(world.default_group)
        assert not leaves_host(world.shared_group(inside))
        assert leaves_host(world.shared_group((world.rank % 2, world.rank % 2 + 2)))


def test_without_a_name_the_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    store = HashStore()
    pair = [World(store, rank, 2, backend="fake", timeout_s=5.0, device=torch.device("cpu")) for rank in range(2)]
    for world in pair:
        tell_host(world)
    assert not any(leaves_host(world.default_group) for world in pair)


def test_of_large_groups_some_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    (world, *_) = worlds(lambda rank: f"host {rank // 8}", 200, monkeypatch)
    asked: list[int] = []
    ask = world.store.multi_get
    monkeypatch.setattr(world.store, "multi_get", lambda keys: asked.append(len(keys)) or ask(keys))
    assert leaves_host(world.default_group)
    assert leaves_host(world.default_group)
    assert len(asked) == 1
    assert asked[0] <= 65


def test_where_nobody_has_told_nothing_is_asked() -> None:
    world = World(HashStore(), 0, 8, backend="fake", timeout_s=0.1, device=torch.device("cpu"))
    assert not leaves_host(world.default_group)
