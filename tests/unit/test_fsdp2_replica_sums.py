"""Sums over the ranks that hold copies go on beside the next module's reduce-scatter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttrain
from disttrain.fsdp2 import fully_shard
from disttrain.fsdp2.transfers import collectives
from disttrain.process_group import ProcessGroup, Work, World, entered_world
from disttrain.store import HashStore


class _Noted:
    """A collective's Work that says when it is waited for."""

    def __init__(self, work: Work, name: str, events: list[str]) -> None:
        self._work, self._name, self._events = work, name, events

    def wait(self) -> None:
        self._events.append(f"{self._name} waited for")
        self._work.wait()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []

    def note(operation: str, name: str) -> None:
        start = getattr(collectives, operation)

        def started(*args: object, group: ProcessGroup, async_op: bool = False) -> _Noted:
            assert async_op
            noted.append(f"{name} started")
            return _Noted(start(*args, group=group, async_op=True), name, noted)

        monkeypatch.setattr(collectives, operation, started)

    note("reduce_scatter_tensor", "scatter")
    note("all_reduce", "sum")
    return noted


def test_a_sum_over_copies_is_waited_for_after_the_next_reduce_scatter_has_started(events: list[str]) -> None:
    with entered_world(World(HashStore(), 0, 4, backend="fake", timeout_s=1.0, device=torch.device("cpu"))):
        mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
    first = ["scatter started", "scatter waited for", "sum started", "scatter started"]
    assert events[:4] == first
    # While one sum goes on, the one before it is taken: two layers' gradients are held, not all layers'.
    assert events[4:8] == ["scatter waited for", "sum started", "sum waited for", "scatter started"]
    assert [events.count(event) for event in ("sum started", "sum waited for")] == [3, 3]
    assert all(parameter.grad is not None for parameter in model.parameters())
