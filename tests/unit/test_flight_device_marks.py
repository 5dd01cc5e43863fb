"""Marks of a device that tests move by hand."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import disttrain
from disttrain.flight_recorder import FlightRecorder
from disttrain.flight_recorder.record import recorder as recorder_file
from disttrain.flight_recorder.record.device import marks as device_marks
from disttrain.flight_recorder.record.device import probe as device_probe
from disttrain.flight_recorder.record.device.marks import DeviceMarks
from disttrain.flight_recorder.record.device.probe import Probe, elapsed_ms, has_stream_ended
from disttrain.process_group import ProcessGroup, World, entered_world
from disttrain.store import HashStore


class HandMoved:
    """A device with one stream: it has come to the first `num_done` events of its `queue`, and it is `now_ms`.

    Who calls one of the driver's functions that are `shut` waits until it is `let_in`.
    """

    def __init__(self) -> None:
        self.queue: list[Event] = []
        self.num_done = 0
        self.now_ms = 0.0
        self.captures = False
        self.has_failed = False
        self.shut: set[str] = set()
        self.let_in = threading.Event()

    def record(self, event: Event, stream: Any) -> None:
        self._enter("record")
        event.record(stream)

    def has_passed(self, event: Event) -> bool:
        self._enter("query")
        return event.query()

    def elapsed_ms(self, begin: Event, end: Event) -> float:
        return begin.elapsed_time(end)

    def _enter(self, function: str) -> None:
        if function in self.shut:
            self.let_in.wait(60.0)

    def event(self) -> Event:
        return Event(self)

    def is_capturing(self) -> bool:
        return self.captures

    def idle_stream(self) -> Any:
        return "idle"

    def go(self, num_events: int, until_ms: float) -> None:
        """Come to so many more."""
        for event in self.queue[self.num_done : self.num_done + num_events]:
            event.done_ms = until_ms
        self.num_done += num_events
        self.now_ms = until_ms


class Event:
    def __init__(self, device: HandMoved) -> None:
        self.device = device
        self.done_ms: float | None = None

    def record(self, stream: Any = None) -> None:
        self.done_ms = None
        if stream == "idle":
            self.done_ms = self.device.now_ms
        else:
            self.device.queue.append(self)

    def query(self) -> bool:
        if self.device.has_failed:
            raise RuntimeError("device-side assert")
        return self.done_ms is not None

    def elapsed_time(self, end_event: Any) -> float:
        assert self.done_ms is not None
        return float(end_event.done_ms - self.done_ms)


class OnGpu:
    """What the marks ask of a tensor."""

    is_cuda = True


class Group:
    def serves(self, device_type: str) -> bool:
        return device_type == "cuda"


SECOND_NS = 1_000_000_000
GROUP = cast(ProcessGroup, Group())
TENSORS = [cast(torch.Tensor, OnGpu())]


def _marked(device: HandMoved, numbers: range, num_records: int = 4) -> DeviceMarks:
    marks = DeviceMarks(num_records, device)
    for number in numbers:
        marks.came(number, number * SECOND_NS, TENSORS, GROUP)
        marks.left(number)
    return marks


def test_how_far_it_has_come() -> None:
    device = HandMoved()
    marks = _marked(device, range(3))
    device.go(1, 10.0)
    device.go(1, 12.0)
    device.go(1, 30.0)
    device.go(0, 32.0)
    found = marks.read()
    began_ns, *_ = found[0]
    assert began_ns is not None
    assert found == {
        0: (began_ns, began_ns + 2_000_000, None),
        1: (began_ns + 20_000_000, None, None),
        2: (None, None, None),
    }


def test_the_last_of_a_place_counts() -> None:
    device = HandMoved()
    marks = _marked(device, range(6))
    assert sorted(marks.read()) == [2, 3, 4, 5]


def test_what_is_called_and_not_waited_for() -> None:
    device = HandMoved()
    marks = _marked(device, range(5))
    marks.came(5, 5 * SECOND_NS, TENSORS, GROUP)
    device.go(11, 5.0)
    came_ns, *others = marks.read()[5]
    assert came_ns is not None
    assert others == [None, None]
    marks.waits(5)
    marks.left(5)
    device.go(1, 7.0)
    device.go(1, 8.0)
    came_ns, left_ns, waits_ns = marks.read()[5]
    assert came_ns is not None
    assert (left_ns, waits_ns) == (came_ns + 3_000_000, came_ns + 2_000_000)


def test_of_calls_in_quick_succession_one_is_timed() -> None:
    device = HandMoved()
    marks = DeviceMarks(4, device)
    for number in range(3):
        marks.came(number, SECOND_NS + number, TENSORS, GROUP)
        marks.left(number)
    device.go(4, 1.0)
    found = marks.read()
    assert [came_ns is not None for came_ns, _, _ in found.values()] == [True] * 3
    assert [number for number, (_, left_ns, _) in found.items() if left_ns is not None] == [0]


def test_only_what_the_device_carries_out_is_marked() -> None:
    device = HandMoved()
    marks = DeviceMarks(4, device)
    marks.came(0, 0, [torch.ones(1)], GROUP)
    marks.left(0)
    assert marks.read() == {}
    marks.came(1, 0, (), GROUP)
    device.captures = True
    marks.came(2, 0, TENSORS, GROUP)
    assert list(marks.read()) == [1]


def test_dumps_have_what_marks_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HandMoved()
    monkeypatch.setattr(recorder_file, "Cuda", lambda: device)
    world = World(HashStore(), 0, 2, backend="fake", timeout_s=1.0, device=torch.device("cuda"))
    recorder = FlightRecorder(num_records=4)
    with entered_world(world):
        recorder.attach(world)
        work = disttrain.barrier(async_op=True)
        assert work is not None
        work.wait()
        disttrain.all_reduce(torch.ones(1))
        device.go(2, 2000.0)
        barrier, on_host = recorder.snapshot("asked for").records
        assert on_host.device is None
        assert barrier.device is not None
        assert barrier.device.came_s == barrier.device.waits_s
        assert barrier.times_s == (barrier.device.came_s, None)
        assert not barrier.is_queued
        device.go(1, 3000.0)
        barrier, _ = recorder.snapshot("asked for").records
    came_s, left_s = barrier.wait_s
    assert left_s is not None
    assert abs(left_s - came_s - 1.0) < 1e-6
    assert abs(came_s + 1.0 - time.time()) < 60.0


def test_a_device_that_has_failed() -> None:
    device = HandMoved()
    marks = _marked(device, range(3))
    device.has_failed = True
    assert marks.read() == {}


def test_a_stream_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HandMoved()
    device.idle_stream = lambda: "taken"  # type: ignore[method-assign]
    monkeypatch.setattr(device_marks, "_MAX_ANSWER_S", 0.01)
    assert _marked(device, range(3)).read() == {}


def test_who_cannot_set_marks_reads_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_marks, "_MAX_ANSWER_S", 0.01)
    device = HandMoved()
    marks = _marked(device, range(3))
    device.go(1, 10.0)
    device.go(1, 12.0)
    device.go(1, 30.0)
    before_ns = time.monotonic_ns()
    began_ns, *_ = marks.read()[0]
    device.shut = {"record"}
    found = marks.read()
    began_again_ns, *_ = found[0]
    assert began_ns is not None
    assert began_ns == began_again_ns
    assert abs(began_ns + 20_000_000 - before_ns) < 1_000_000_000
    assert found == {
        0: (began_ns, began_ns + 2_000_000, None),
        1: (began_ns + 20_000_000, None, None),
        2: (None, None, None),
    }
    device.let_in.set()
    device.shut = set()
    deadline_s = time.monotonic() + 60
    while marks.read()[0] == found[0]:  # by the old clock
        assert time.monotonic() < deadline_s


def test_a_clock_that_was_read_late_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_marks, "_MAX_ANSWER_S", 0.5)
    device = HandMoved()
    marks = _marked(device, range(3))
    device.go(1, 10.0)
    began_ns, *_ = marks.read()[0]
    assert began_ns is not None
    device.shut = {"query"}
    assert marks.read() == {2: (None, None, None)}  # leaves a thread behind, which has recorded
    time.sleep(2.0)
    device.shut = {"record"}
    device.let_in.set()
    time.sleep(0.3)
    device.let_in.clear()
    began_again_ns, *_ = marks.read()[0]
    device.let_in.set()
    assert began_again_ns is not None
    assert abs(began_again_ns - began_ns) < 1_500_000_000


def test_the_clock_of_who_reads_is_not_set_again_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_marks, "_MAX_ANSWER_S", 30.0)
    device, is_reading, go_on = HandMoved(), threading.Event(), threading.Event()
    marks = _marked(device, range(3))
    device.go(1, 10.0)
    began_ns, *_ = marks.read()[0]
    elapsed_ms, found = Event.elapsed_time, []

    def wait(begin: Event, end: Event) -> float:
        monkeypatch.setattr(Event, "elapsed_time", elapsed_ms)
        is_reading.set()
        go_on.wait(60.0)
        return elapsed_ms(begin, end)

    monkeypatch.setattr(Event, "elapsed_time", wait)
    first = threading.Thread(target=lambda: found.append(marks.read()))
    first.start()
    assert is_reading.wait(60.0)
    others = [threading.Thread(target=marks.read) for _ in range(2)]
    for other in others:
        device.now_ms += 5000.0
        other.start()
        other.join(0.2)
    go_on.set()
    for reader in (first, *others):
        reader.join()
    ((came_ns, *_),) = (each[0] for each in found)
    assert began_ns is not None
    assert came_ns is not None
    assert abs(came_ns - began_ns) < SECOND_NS


def test_a_driver_that_lets_nobody_in_has_not_come_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_marks, "_MAX_ANSWER_S", 0.01)
    device = HandMoved()
    marks = _marked(device, range(3))
    device.shut = {"record", "query"}
    assert marks.read() == {2: (None, None, None)}
    assert _marked(device, range(0)).read() == {}
    device.let_in.set()


def test_a_question_without_an_answer_is_left_alone() -> None:
    is_asked, come_back, num_asked = threading.Event(), threading.Event(), 0

    def question() -> int:
        nonlocal num_asked
        num_asked += 1
        is_asked.set()
        come_back.wait(60.0)
        return num_asked

    probe = Probe(limit_s=0.01)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            probe.ask(question)
    assert is_asked.wait(60.0)
    assert num_asked == 1
    come_back.set()
    deadline_s = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline_s
        with suppress(TimeoutError):
            assert probe.ask(question) == num_asked
            break
    with pytest.raises(ZeroDivisionError):
        probe.ask(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match=r"no CUDA runtime|cudaSetDevice failed"):
        has_stream_ended(0)


def test_questions_are_asked_one_at_a_time() -> None:
    go_on, num_running, most_running = threading.Event(), 0, 0

    def question() -> None:
        nonlocal num_running, most_running
        num_running += 1
        most_running = max(most_running, num_running)
        go_on.wait(60.0)
        time.sleep(0.2)
        num_running -= 1

    probe = Probe(limit_s=60.0)
    threads = [threading.Thread(target=probe.ask, args=(question,)) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    go_on.set()
    for thread in threads:
        thread.join()
    assert most_running == 1


def test_events_that_are_recorded_again_have_no_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "_call", lambda name, *_: 600)
    event = cast(torch.Event, SimpleNamespace(event_id=1))
    with pytest.raises(RuntimeError, match="recorded again"):
        elapsed_ms(event, event)
