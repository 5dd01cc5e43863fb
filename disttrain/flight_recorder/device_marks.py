"""Marks on a GPU's streams at each operation: how far the device has come, whatever the host knows of it.

A mark is an event of CUDA's. To set it waits for nothing, and only who dumps looks at it. They are set on the streams
that call an operation and wait for it, not on the transport's own: these come to the first when all that was queued
before is done, and to the last when they go on. CUDA runtime API, "Event Management".
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from disttrain.flight_recorder.device_probe import Probe, beside_captures, query_device

if TYPE_CHECKING:
    from disttrain.flight_recorder.ring_reader import MarkedNs
    from disttrain.process_group import ProcessGroup

_MAX_ANSWER_S: Final = 0.5
"""How long an idle stream may take to come to a mark, for all marks to be put beside the host's clock."""
MIN_BETWEEN_NS: Final = 5_000_000
"""From an operation of which it is marked how long it takes, to the next: each mark costs a GPU a few microseconds.
That a device comes to an operation is marked always, since any may be the one that a job hangs in."""


class Event(Protocol):
    """A mark, as `torch.Event` is one."""

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class Device(Protocol):
    """What sets marks: a GPU, or a test's stand-in."""

    def event(self) -> Event:
        """A new mark."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream writes down a graph in place of running what it is given."""
        ...

    def idle_stream(self) -> Any:
        """One that nothing is queued on."""
        ...

    def answers(self) -> bool:
        """Whether it can be asked now without waiting. It has been asked for its `idle_stream` before."""
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
        stream = torch.cuda.Stream(priority=-1)
        self._probe = Probe(partial(query_device, stream.device.index))
        return stream

    def answers(self) -> bool:
        return self._probe.answers()


class DeviceMarks:
    """The marks of the last `num_records` records, by their numbers."""

    def __init__(self, num_records: int, device: Device) -> None:
        self._device = device
        # Made by the first operation: the GPU is left alone until the script has chosen it.
        self._idle_stream: Any = None
        self._came, self._waits, self._left = (_Kind(num_records) for _ in range(3))
        self._timed = [-1] * num_records
        self._time_next_ns = 0

    def came(self, number: int, now_ns: int, tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
        """Mark that the device comes to record `number`, if it is a device that carries it out."""
        is_on_device = tensors[0].is_cuda if tensors else group.serves("cuda")
        # A mark in a graph is of no operation of this process's.
        try:
            if is_on_device and not self._device.is_capturing():
                if self._idle_stream is None:
                    self._begin()
                self._came.mark(number)
                if now_ns >= self._time_next_ns:
                    self._time_next_ns = now_ns + MIN_BETWEEN_NS
                    self._timed[number % len(self._timed)] = number
        except RuntimeError:
            pass  # The device has failed: the operation says so.

    def waits(self, number: int) -> None:
        """Mark that the current stream begins to wait for record `number`, if that is timed."""
        if self._timed[number % len(self._timed)] == number:
            self._waits.mark(number)

    def left(self, number: int) -> None:
        """Mark that the current stream goes on behind record `number`, if that is timed."""
        if self._timed[number % len(self._timed)] == number:
            self._left.mark(number)

    def read(self) -> dict[int, MarkedNs]:
        """Of each record that was marked: when the device came to it, had left it, and began to wait for it, by the
        monotonic clock, or None.

        Never waits for what the device is at. Empty where it does not answer.
        """
        if self._idle_stream is None:
            return {}
        if not self._device.answers():
            # Somebody waits in its driver for what is queued, so that it has not come to the last of that.
            last = max(self._came.numbers)
            return {last: (None, None, None)} if last >= 0 else {}
        with beside_captures():
            try:
                now = self._device.event()
                now.record(self._idle_stream)
                end_s = time.monotonic() + _MAX_ANSWER_S
                while not now.query():
                    if time.monotonic() > end_s:
                        return {}
                    time.sleep(1e-4)
                now_ns = time.monotonic_ns()
            except RuntimeError:  # It has failed.
                return {}
            return dict(self._read(now, now_ns))

    def _read(self, now: Event, now_ns: int) -> Iterator[tuple[int, MarkedNs]]:
        for number in self._came.numbers:
            if number >= 0:
                try:
                    kinds = self._came, self._left, self._waits
                    came_ns, left_ns, waits_ns = [kind.passed_ns(number, now, now_ns) for kind in kinds]
                except RuntimeError:
                    continue  # Of another device, or in a graph.
                if self._came.has(number):
                    yield number, (came_ns, left_ns, waits_ns)

    def _begin(self) -> None:
        for kind in (self._came, self._waits, self._left):
            kind.events = [self._device.event() for _ in kind.numbers]
        self._idle_stream = self._device.idle_stream()


class _Kind:
    """Marks of one kind: that of record `number` at `number % num_records`, if it is that record's."""

    __slots__ = ("_num_records", "events", "numbers")

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self.events: list[Event] = []
        self.numbers = [-1] * num_records

    def mark(self, number: int) -> None:
        place = number % self._num_records
        # Not the earlier one's any more, and not this one's before it is set.
        self.numbers[place] = -1
        try:
            self.events[place].record()
        except RuntimeError:
            return  # As above.
        self.numbers[place] = number

    def has(self, number: int) -> bool:
        return self.numbers[number % self._num_records] == number

    def passed_ns(self, number: int, now: Event, now_ns: int) -> int | None:
        """When the device came to it; None where it was not set, or the device has not come to it."""
        event = self.events[number % self._num_records]
        if not self.has(number) or not event.query():
            return None
        return now_ns - int(event.elapsed_time(now) * 1e6)
