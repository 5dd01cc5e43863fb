"""The watchdog sees a host that waits for a GPU which does not come to an end, and no other."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import disttrain
from disttrain.flight_recorder import FlightRecorder, read_dump
from disttrain.flight_recorder.live.watchdog import Watchdog
from disttrain.flight_recorder.record.device.marks import MIN_BETWEEN_NS
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


def _world() -> World:
    return World(HashStore(), 0, 2, backend="fake", timeout_s=60.0, device=torch.device("cuda"))


def test_marks_tell_how_far_the_device_has_come() -> None:
    recorder = FlightRecorder()
    world, tensor = _world(), torch.ones(4, device="cuda")
    with entered_world(world):
        recorder.attach(world)
        disttrain.all_reduce(tensor)
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES // 5)
        time.sleep(2e-9 * MIN_BETWEEN_NS)
        disttrain.all_reduce(tensor)
        disttrain.all_reduce(torch.ones(4))
        begun, held, on_host = recorder.snapshot("asked for").records
        torch.cuda.synchronize()
        ended_s = time.time()
        *_, over, _ = recorder.snapshot("asked for").records
    assert begun.device is not None
    assert begun.device.came_s is not None
    assert begun.device.left_s is not None
    assert begun.enqueued_s - 0.1 < begun.device.came_s <= begun.device.left_s < held.enqueued_s + 0.1
    assert held.device == (None, None, None)
    assert held.is_queued
    assert on_host.device is None
    assert over.device is not None
    assert over.device.came_s is not None
    assert over.device.left_s is not None
    assert ended_s - 0.2 < over.device.came_s <= over.device.left_s <= ended_s + 0.1


def test_marks_wait_for_nothing() -> None:
    """Not for a stream that an operation was called on, however long that takes."""
    recorder = FlightRecorder()
    world, tensor = _world(), torch.ones(4, device="cuda")
    with entered_world(world):
        recorder.attach(world)
        disttrain.all_reduce(tensor)
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES // 5)
        start_s = time.monotonic()
        for _ in range(100):
            disttrain.all_reduce(tensor)
        records = recorder.snapshot("asked for").records
        took_s = time.monotonic() - start_s
        torch.cuda.synchronize()
    assert sum(record.is_queued for record in records) == 100
    assert took_s < 1.0


def test_a_dump_beside_a_thread_that_waits_in_the_driver() -> None:
    """Which keeps others out of most of it, until what is queued ends."""
    recorder = FlightRecorder()
    world, tensor = _world(), torch.ones(4, device="cuda")
    held = [torch.empty(1 << 28, device="cuda")]

    def free() -> None:
        held.clear()
        torch.cuda.empty_cache()

    with entered_world(world):
        recorder.attach(world)
        disttrain.all_reduce(tensor)
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES // 2)
        disttrain.all_reduce(tensor)
        waiting = threading.Thread(target=free, daemon=True)
        waiting.start()
        waiting.join(0.3)
        start_s = time.monotonic()
        over, queued = recorder.snapshot("asked for").records
        took_s = time.monotonic() - start_s
        assert took_s < 3.0
        assert waiting.is_alive()
        waiting.join()
    assert over.device is not None
    assert over.device.came_s is not None
    assert over.enqueued_s - 0.1 < over.device.came_s < queued.enqueued_s + 0.1
    assert queued.is_queued


def test_a_dump_beside_a_capture_leaves_it_whole() -> None:
    recorder = FlightRecorder()
    world, tensor = _world(), torch.ones(4, device="cuda")
    stop, has_dumped = threading.Event(), threading.Semaphore(0)

    def dump() -> None:
        while not stop.is_set():
            recorder.snapshot("asked for")
            has_dumped.release()

    with entered_world(world):
        recorder.attach(world)
        disttrain.all_reduce(tensor)
        recorder.snapshot("asked for")
        dumping = threading.Thread(target=dump, daemon=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dumping.start()
            for _ in range(5):
                tensor += 1
                disttrain.all_reduce(tensor)
                assert has_dumped.acquire(timeout=10)
        stop.set()
        dumping.join(20)
        before = tensor.sum().item()
        graph.replay()
        first, *captured = recorder.snapshot("asked for").records
    assert tensor.sum().item() == before + 4 * 5
    assert first.device is not None
    assert {record.device for record in captured} == {None}
