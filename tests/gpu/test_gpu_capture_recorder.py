"""The flight recorder tells what a captured step replays, and where in it the GPU is."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

import disttrain
from disttrain.compiling import capture_step
from disttrain.errors import CollectiveTimeoutError, DisttrainError
from disttrain.flight_recorder import FlightRecorder
from disttrain.flight_recorder.dumps.expanding import expanded
from disttrain.flight_recorder.live.replay_limits import ReplayLimits, end_overdue
from disttrain.process_group import World, current_world, entered_world
from disttrain.store import HashStore
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS

pytestmark = pytest.mark.gpu

CYCLES = 2_000_000_000
"""About a second of a GPU."""


def world_of_two() -> World:
    return World(HashStore(), 0, 2, backend="fake", timeout_s=60.0, device=torch.device("cuda"))


def test_marks_tell_which_operation_a_replay_is_in() -> None:
    recorder, world = FlightRecorder(), world_of_two()

    def step(x: torch.Tensor) -> torch.Tensor:
        world.module = "first"
        disttrain.all_reduce(x)
        torch.cuda._sleep(CYCLES)
        world.module = "second"
        disttrain.all_reduce(x)
        world.module = ""
        return x + 1

    with entered_world(world):
        recorder.attach(world)
        captured = capture_step(step, num_warmups=1)
        x = torch.ones(4, device="cuda")
        captured(x)
        captured(x)
        torch.cuda.synchronize()
        begin_s = time.monotonic()
        captured(x)
        result = captured(x)
        assert time.monotonic() - begin_s < 0.3
        time.sleep(0.3)
        within = recorder.snapshot("asked for")
        torch.cuda.synchronize()
        over = recorder.snapshot("asked for")
        assert world.default_group.sequence == 8
    assert result.tolist() == [2.0] * 4
    assert [record.site.operation for record in within.records] == ["all_reduce"] * 2
    assert [replay.not_come for replay in within.replays] == [(), (1,), (0, 1)]
    assert [replay.before for replay in within.replays] == [(2,), (4,), (6,)]
    past, now, queued = (replay.device for replay in within.replays)
    assert past is not None
    assert now is not None
    assert past.left_s is not None
    assert now.came_s is not None
    assert past.came_s is not None
    assert past.came_s < past.left_s <= now.came_s
    assert now.left_s is None
    assert queued == (None, None, None)
    called = [(record.sequence, record.module, record.replay) for record in expanded(within).records[-4:]]
    assert called == [
        (5, "first", "replay 2 of step graph 1"),
        (6, "second", "replay 2 of step graph 1"),
        (7, "first", "replay 3 of step graph 1"),
        (8, "second", "replay 3 of step graph 1"),
    ]
    assert [replay.not_come for replay in over.replays] == [()] * 3
    assert all(replay.device is not None and replay.device.left_s is not None for replay in over.replays)


def test_a_replay_that_does_not_end_in_time_is_told() -> None:
    recorder, world = FlightRecorder(), world_of_two()

    def step(x: torch.Tensor) -> torch.Tensor:
        world.module = "layers.3"
        disttrain.all_reduce(x)
        world.module = ""
        torch.cuda._sleep(CYCLES)
        return x + 1

    with entered_world(world):
        recorder.attach(world)
        captured = capture_step(step, num_warmups=1)
        x = torch.ones(4, device="cuda")
        captured(x)
        captured(x)
        torch.cuda.synchronize()
        captured(x)
        time.sleep(0.3)
        limits = ReplayLimits()
        assert limits.look(recorder.listings, 0.0) == []
        (overdue,) = limits.look(recorder.listings, 61.0)
        end_overdue(*overdue)
        with pytest.raises(CollectiveTimeoutError, match=r"in replay 2 of step graph 1.* sequence 3, layers\.3"):
            captured(x)
        torch.cuda.synchronize()


def test_a_replay_costs_the_host_a_constant() -> None:
    recorder, world = FlightRecorder(), world_of_two()
    x = torch.ones(4, device="cuda")
    costs_us = {}
    with entered_world(world):
        recorder.attach(world)
        for num_calls in (2, 500):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with recorder.listing() as replays, torch.cuda.graph(graph):
                replays.begin_graph()
                for _ in range(num_calls):
                    disttrain.all_reduce(x)
                replays.end_graph()
            times_s = []
            for index in range(200):
                begin_s = time.perf_counter()
                replays.begin(is_first=not index)
                middle_s = time.perf_counter()
                graph.replay()
                again_s = time.perf_counter()
                replays.end()
                times_s.append(middle_s - begin_s + time.perf_counter() - again_s)
                torch.cuda.synchronize()
            costs_us[num_calls] = statistics.median(times_s) * 1e6
            assert replays.progress() == [200] * (num_calls + 1)
    print(f"\nmicroseconds of the host per replay, by operations: {costs_us}")
    # What is not in the processor's caches costs more; five hundred calls to the recorder would take milliseconds.
    assert costs_us[500] < costs_us[2] + 50


def test_what_a_mark_costs_the_gpu() -> None:
    """Prints it: a mark is a kernel that writes four bytes to the host's memory."""
    recorder, world = FlightRecorder(), world_of_two()
    x = torch.ones(1 << 20, device="cuda")
    taken_ms = {}
    with entered_world(world):
        recorder.attach(world)
        for is_listed in (False, True):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with recorder.listing(is_of_graph=lambda tensors, group: is_listed), torch.cuda.graph(graph):  # noqa: B023
                for _ in range(200):
                    x.add_(1)
                    disttrain.all_reduce(x)
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken_ms[is_listed] = begin.elapsed_time(end) / 20
    per_mark_us = (taken_ms[True] - taken_ms[False]) / 200 * 1e3
    print(f"\nmicroseconds of the GPU per mark: {per_mark_us:.2f}")
    assert per_mark_us < 10


def test_a_destroyed_group_is_not_replayed() -> None:
    recorder, world = FlightRecorder(), world_of_two()
    pair = world.new_group([0, 1])

    def step(x: torch.Tensor) -> torch.Tensor:
        disttrain.all_reduce(x, group=pair)
        return x + 1

    with entered_world(world):
        recorder.attach(world)
        captured = capture_step(step, num_warmups=1)
        x = torch.ones(4, device="cuda")
        for _ in range(3):
            captured(x)
        disttrain.destroy_process_group(pair)
        with pytest.raises(DisttrainError, match=r"group .* has been destroyed"):
            captured(x)


@on_ranks(NUM_GPU_RANKS)
def test_ranks_count_alike_whether_they_replay_or_not() -> None:
    world = current_world()
    recorder = world.recorder
    assert isinstance(recorder, FlightRecorder)
    group = world.default_group

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        disttrain.all_reduce(y)
        work = disttrain.all_reduce(y, async_op=True)
        assert work is not None
        work.wait()
        return y

    captured = capture_step(step, num_warmups=1)
    size = disttrain.get_world_size()
    before = group.sequence
    for index in range(6):
        x = torch.full((8,), float(index), device="cuda")
        result = captured(x) if index % 3 else step(x)
        assert result.tolist() == [2.0 * index * size * size] * 8
    assert group.sequence == before + 12
    torch.cuda.synchronize()
    dump = expanded(recorder.snapshot("asked for"))
    calls = [record for record in dump.records if record.site.group_name == "world"][-12:]
    assert [record.sequence for record in calls] == list(range(before + 1, before + 13))
    assert {record.site.operation for record in calls} == {"all_reduce"}
    assert len({record.site.stack[0].line for record in calls}) == 2
