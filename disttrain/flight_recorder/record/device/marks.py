"""Marks on a GPU's streams at each operation, which show how far the device has come.

A mark is a CUDA event. Recording one waits for nothing, and events are queried only for a dump. They are recorded on
the streams that call an operation and wait for it, not on the transport's own. The device comes to the first when all
work that was queued before is done, and to the second when the waiting stream goes on. CUDA runtime API, "Event
Management".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from disttrain.flight_recorder.record.device import probe as device_probe
from disttrain.flight_recorder.record.device.probe import Probe, beside_captures

if TYPE_CHECKING:
    from disttrain.flight_recorder.dumps.rings.reader import MarkedNs
    from disttrain.process_group.interfaces import GroupLike

_MAX_ANSWER_S: Final = 0.5
"""The time that an idle stream may take to come to a mark, for all marks to be put beside the host's clock."""
_MAX_TURN_S: Final = 8 * _MAX_ANSWER_S
"""The time that earlier readers may take: two of them that block in the driver."""
MIN_BETWEEN_NS: Final = 5_000_000
"""The time between two operations whose durations are marked, since each mark costs a GPU a few microseconds. The mark
of a device's arrival is always set, since a job may hang in any operation."""


class Event(Protocol):
    """A mark, as `torch.Event` is one."""

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class Device(Protocol):
    """The device on which marks are set: a GPU, or a test's stand-in."""

    def event(self) -> Event:
        """A new mark."""
        ...

    def is_capturing(self) -> bool:
        """True while the current stream captures a graph."""
        ...

    def idle_stream(self) -> Any:
        """One that nothing is queued on."""
        ...

    def record(self, event: Any, stream: Any) -> None:
        """Record an event again. As the next two, it may wait for what another thread does in the driver, but leaves
        the interpreter's lock to others."""
        ...

    def has_passed(self, event: Any) -> bool:
        """True if the device has come to the event, as `event.query`."""
        ...

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """The time between two events, as `begin.elapsed_time`."""
        ...


class Cuda:
    """The current GPU."""

    def event(self) -> Event:
        event: Event = torch.Event("cuda", enable_timing=True)
        return event

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def idle_stream(self) -> torch.cuda.Stream:
        # From torch's pool: of those with this priority few are taken.
        return torch.cuda.Stream(priority=-1)

    record = staticmethod(device_probe.record)
    has_passed = staticmethod(device_probe.has_passed)
    elapsed_ms = staticmethod(device_probe.elapsed_ms)


class _Clock(NamedTuple):
    """An event that the device has passed at `passed_ns` of the host's clock, and how to put others beside it."""

    event: Any
    passed_ns: int
    has_passed: Callable[[Any], bool]
    elapsed_ms: Callable[[Any, Any], float]


class DeviceMarks:
    """The marks of the last `num_records` records, by their numbers."""

    def __init__(self, num_records: int, device: Device) -> None:
        self._device = device
        # Made by the first operation: the GPU is left alone until the script has chosen it.
        self._idle_stream: Any = None
        # Two, since one may wait in the driver for something that the other does not need.
        self._probes = Probe(2 * _MAX_ANSWER_S), Probe(2 * _MAX_ANSWER_S)
        # The event that one reads by is recorded again by the next but one.
        self._turn = threading.RLock()
        self._came, self._waits, self._left = (_Kind(num_records) for _ in range(3))
        self._timed = [-1] * num_records
        self._time_next_ns = 0

    def came(self, number: int, now_ns: int, tensors: Sequence[torch.Tensor], group: GroupLike) -> None:
        """Mark that the device comes to record `number`, if it is a device that carries it out."""
        is_on_device = tensors[0].is_cuda if tensors else group.serves("cuda")
        # A mark in a graph is of no operation of this process's.
        try:
            if is_on_device and not self._device.is_capturing():
                self._comes(number)
                if now_ns >= self._time_next_ns:
                    self._time_next_ns = now_ns + MIN_BETWEEN_NS
                    self._timed[number % len(self._timed)] = number
        except RuntimeError:
            pass  # The device has failed: the operation says so.

    def replay_begins(self, number: int) -> None:
        """Mark that the device comes to a graph, of which record `number` is a replay; `left` marks its end."""
        # RuntimeError: the device has failed, as above.
        with suppress(RuntimeError):
            self._comes(number)
            self._timed[number % len(self._timed)] = number

    def _comes(self, number: int) -> None:
        if self._idle_stream is None:
            self._begin()
        self._came.mark(number)

    def waits(self, number: int) -> None:
        """Mark that the current stream begins to wait for record `number`, if that is timed."""
        if self._timed[number % len(self._timed)] == number:
            self._waits.mark(number)

    def left(self, number: int) -> None:
        """Mark that the current stream goes on behind record `number`, if that is timed."""
        if self._timed[number % len(self._timed)] == number:
            self._left.mark(number)

    def read(self) -> dict[int, MarkedNs]:
        """The times of each record that was marked: when the device came to it, had left it, and began to wait for it,
        by the monotonic clock, or None.

        Never waits for what the device is at. Empty where it has failed.
        """
        if self._idle_stream is None:
            return {}
        marked_ns: dict[int, MarkedNs] = {}
        if self._turn.acquire(timeout=_MAX_TURN_S):
            try:
                if self._has_read(marked_ns):
                    return marked_ns
            except RuntimeError:
                return {}
            finally:
                self._turn.release()
        # What that is for is queued, so that the device has not come to the last of it.
        last = max(self._came.numbers)
        return marked_ns.copy() or ({last: (None, None, None)} if last >= 0 else {})

    def _has_read(self, marked_ns: dict[int, MarkedNs]) -> bool:
        """True if all is in `marked_ns`; else another thread waits in the driver. RuntimeError: the device has
        failed."""
        for read in (self._read_by_new_clock, self._read_by_last_clock):
            with suppress(TimeoutError):
                read(marked_ns)
                return True
        return False

    def _read_by_new_clock(self, marked_ns: dict[int, MarkedNs]) -> None:
        clock = self._probes[0].ask(self._set_clock)
        # The driver does not block, so torch is asked, which is faster, since it keeps the interpreter's lock.
        with beside_captures():
            self._read(clock, marked_ns)

    def _read_by_last_clock(self, marked_ns: dict[int, MarkedNs]) -> None:
        """The clocks may have drifted apart since, by some microseconds in a second."""
        self._probes[1].ask(lambda: self._read_apart(marked_ns))

    def _read_apart(self, marked_ns: dict[int, MarkedNs]) -> None:
        with beside_captures():
            clock = _Clock(*self._last_clock, self._device.has_passed, self._device.elapsed_ms)
            if clock.has_passed(clock.event):
                self._read(clock, marked_ns)

    def _set_clock(self) -> _Clock:
        """Raises TimeoutError when the idle stream does not come to it, RuntimeError when the device has failed."""
        with beside_captures():
            event = self._clock_events[0]
            end_ns = time.monotonic_ns() + int(_MAX_ANSWER_S * 1e9)
            self._device.record(event, self._idle_stream)
            while True:
                has_passed, now_ns = self._device.has_passed(event), time.monotonic_ns()
                # A call that blocks in the driver shows that the event was passed, but not when.
                if now_ns > end_ns:
                    raise TimeoutError
                if has_passed:
                    break
                time.sleep(1e-4)
            self._last_clock = event, now_ns
            self._clock_events.reverse()
        return _Clock(*self._last_clock, _query, _elapsed_ms)

    def _read(self, clock: _Clock, marked_ns: dict[int, MarkedNs]) -> None:
        """Put into `found` what there is, the newest first: the driver may let nobody in before the end."""
        for number in sorted(self._came.numbers, reverse=True):
            if number >= 0:
                try:
                    kinds = self._came, self._left, self._waits
                    came_ns, left_ns, waits_ns = [kind.passed_ns(number, clock) for kind in kinds]
                except RuntimeError:
                    continue  # Of another device, or in a graph.
                if self._came.has(number):
                    marked_ns[number] = came_ns, left_ns, waits_ns

    def _begin(self) -> None:
        for kind in (self._came, self._waits, self._left):
            kind.events = [self._device.event() for _ in kind.numbers]
        idle_stream = self._device.idle_stream()
        self._clock_events = [self._device.event(), self._device.event()]
        for event in self._clock_events:
            self._last_clock = event, time.monotonic_ns()
            event.record(idle_stream)
        self._idle_stream = idle_stream


def _query(event: Event) -> bool:
    return event.query()


def _elapsed_ms(begin: Event, end: Event) -> float:
    return begin.elapsed_time(end)


class _Kind:
    """Marks of one kind: that of record `number` at `number % num_records`, if it is that record's."""

    __slots__ = ("_num_records", "events", "numbers")

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self.events: list[Event] = []
        self.numbers = [-1] * num_records

    def mark(self, number: int) -> None:
        index = number % self._num_records
        # Not the earlier one's any more, and not this one's before it is set.
        self.numbers[index] = -1
        try:
            self.events[index].record()
        except RuntimeError:
            return  # As above.
        self.numbers[index] = number

    def has(self, number: int) -> bool:
        return self.numbers[number % self._num_records] == number

    def passed_ns(self, number: int, clock: _Clock) -> int | None:
        """The time at which the device came to it; None where it was not set, or the device has not come to it."""
        event = self.events[number % self._num_records]
        if not self.has(number) or not clock.has_passed(event):
            return None
        return clock.passed_ns - int(clock.elapsed_ms(event, clock.event) * 1e6)
