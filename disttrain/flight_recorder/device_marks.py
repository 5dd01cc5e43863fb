"""Marks on a GPU's streams, before and behind each operation: how far the device has come, whatever the host knows.

A mark is an event of CUDA's. To set it costs the host a microsecond and waits for nothing; only who dumps looks at it.
They are set on the stream that calls the operation, not on the transport's own: it comes to the first when all that was
queued before is done, to the second when it goes on. CUDA runtime API, "Event Management".
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

if TYPE_CHECKING:
    from disttrain.flight_recorder.ring_reader import MarkedNs
    from disttrain.process_group import ProcessGroup

_MAX_ANSWER_S: Final = 0.5
"""How long an idle stream may take to come to a mark, for all marks to be put beside the host's clock."""
_CAPTURE_MODE_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed


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


class DeviceMarks:
    """The marks of the last `num_records` records, by their numbers."""

    def __init__(self, num_records: int, device: Device) -> None:
        self._num_records = num_records
        self._device = device
        # Made by the first operation: the GPU is left alone until the script has chosen it.
        self._idle_stream: Any = None
        self._came: list[Event] = []
        self._left: list[Event] = []
        self._came_for = [-1] * num_records
        self._left_for = [-1] * num_records

    def came(self, number: int, tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
        """Mark that the device comes to record `number`, if it is a device that carries it out."""
        is_on_device = tensors[0].is_cuda if tensors else group.serves("cuda")
        # A mark in a graph is of no operation of this process's.
        try:
            if is_on_device and not self._device.is_capturing():
                if self._idle_stream is None:
                    self._begin()
                place = number % self._num_records
                self._came_for[place] = number
                self._came[place].record()
        except RuntimeError:
            pass  # The device has failed: the operation says so.

    def left(self, number: int) -> None:
        """Mark that the current stream goes on behind record `number`, if that `came`."""
        place = number % self._num_records
        if self._came_for[place] == number:
            try:
                self._left[place].record()
            except RuntimeError:
                return  # As above.
            self._left_for[place] = number

    def read(self) -> dict[int, MarkedNs]:
        """Of each record that was marked: when the device came to it and had left it, by the monotonic clock, or None.

        Never waits for what the device is at. Empty where it does not answer.
        """
        if self._idle_stream is None:
            return {}
        with _beside_captures():
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
        for place, number in enumerate(self._came_for):
            if number >= 0:
                try:
                    came_ns = _passed_ns(self._came[place], now, now_ns)
                    is_marked = came_ns is not None and self._left_for[place] == number
                    left_ns = _passed_ns(self._left[place], now, now_ns) if is_marked else None
                except RuntimeError:
                    continue  # Of another device, or in a graph.
                if self._came_for[place] == number:
                    yield number, (came_ns, left_ns)

    def _begin(self) -> None:
        self._came, self._left = ([self._device.event() for _ in range(self._num_records)] for _ in range(2))
        self._idle_stream = self._device.idle_stream()


def _passed_ns(mark: Event, now: Event, now_ns: int) -> int | None:
    return now_ns - int(mark.elapsed_time(now) * 1e6) if mark.query() else None


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Let this thread ask for events while another one captures a graph, which would be spoilt by that otherwise.

    CUDA runtime API, cudaThreadExchangeStreamCaptureMode. torch has loaded the runtime for all to see.
    """
    exchange = getattr(ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None)
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))
