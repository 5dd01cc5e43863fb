"""The watchdog sees a host that waits for a GPU which does not come to an end, and no other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import disttrain
from disttrain.flight_recorder import FlightRecorder, read_dump
from disttrain.flight_recorder.watchdog import Watchdog
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore

pytestmark = pytest.mark.gpu

LIMIT_S = 1.0
CYCLES = 20_000_000_000
"""Some ten seconds of a GPU."""


def test_a_synchronization_that_does_not_end(tmp_path: Path) -> None:
    world = World(HashStore(), 0, 2, backend="fake", timeout_s=60.0, device=torch.device("cuda"))
    recorder = FlightRecorder()
    with entered_world(world):
        recorder.attach(world, tmp_path)
        watchdog = Watchdog(recorder, tmp_path, tmp_path, LIMIT_S, ends_job=False)
        disttrain.all_reduce(torch.ones(4, device="cuda"))
        assert not threading.Event().wait(3 * LIMIT_S)
        assert list(tmp_path.glob("*.flight")) == []
        torch.cuda._sleep(CYCLES)
        torch.cuda.synchronize()
        watchdog.close()
    (file,) = tmp_path.glob("*.flight")
    dump = read_dump(file)
    assert dump.reason.startswith("rank 0 has waited for ")
    assert dump.device_is_busy
