"""What a layer of experts over ranks costs the host: torch's operators are counted, and what is recorded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import disttrain
from disttrain.experts import Experts, shard_experts
from disttrain.flight_recorder import FlightRecorder
from disttrain.process_group import World

ROOT = Path(__file__).parents[2]
MOST_OPERATORS = {"all_to_all": 53, "padded": 86}
"""Of a layer's forward and backward, without what kernels compute."""


@pytest.fixture
def world() -> Iterator[World]:
    """Rank 0 of four whose transport has no peers: each sends this one what it sends them."""
    world = World(disttrain.HashStore(), 0, 4, backend="fake", timeout_s=1.0)
    with disttrain.process_group.entered_world(world):
        yield world


@pytest.fixture
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("experts_host")
    sys.path.remove(str(ROOT / "benchmarks"))


def divided(exchange: str) -> Experts:
    mesh = disttrain.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    layer = Experts(8, 16, 16)
    shard_experts(layer, mesh["ep"], exchange=exchange, src_data_rank=None)
    return layer


@pytest.mark.parametrize("exchange", list(MOST_OPERATORS))
def test_operators_of_a_layer(world: World, script: ModuleType, exchange: str) -> None:
    with script.unwritten():
        step = script.stepping(divided(exchange))
        step()
        step()
        with torch.autograd.profiler.profile() as profile:
            step()
    outermost = [
        event.name
        for event in profile.function_events
        if event.name.startswith("aten::")
        and (event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::"))
    ]
    assert 0 < len(outermost) <= MOST_OPERATORS[exchange], outermost


def test_sizes_that_are_others_at_each_step_are_not_described_anew(world: World) -> None:
    recorder = FlightRecorder(num_records=64, marks_device=False)
    recorder.attach(world)
    layer = divided("all_to_all")
    x = torch.randn(32, 16, requires_grad=True)

    described = []
    for _ in range(6):
        weights, indices = torch.randn(32, 8).topk(2)
        layer(x, indices, weights).sum().backward()
        described.append(recorder.content().count(b"all_to_all_single"))
    # Of the sizes, and of rows there and back, forward and backward.
    assert described == [5] * 6
