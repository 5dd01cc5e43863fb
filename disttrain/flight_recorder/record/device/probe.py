"""Queries a GPU's driver from a thread, so that nobody waits for it.

A thread may block in the driver behind a kernel that does not end, such as one that creates a communicator or loads a
kernel. It locks other threads out of most of the driver. A thread that calls the driver through torch then waits with
the interpreter's lock held, and the whole process stops. Here the driver is called by ctypes, which releases that lock,
in a thread that may be abandoned. CUDA runtime API, "Event Management" and "Stream Management".
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")

_LIMIT_S: Final = 0.5
"""A question takes microseconds."""
_CAPTURE_MODE_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed
_NOT_READY: Final = 600  # cudaErrorNotReady


class Probe:
    """Asks in a thread of its own, one question at a time."""

    def __init__(self, limit_s: float = _LIMIT_S) -> None:
        self._limit_s = limit_s
        self._asked: Future[Any] | None = None
        # Of who comes next: several threads of a process may make dumps at once.
        self._turn = threading.RLock()

    def ask(self, question: Callable[[], T]) -> T:
        """Returns: its answer. Raises what it raises; TimeoutError when there is none within the limit, as long as an
        earlier question has none."""
        answer: Future[T] = Future()

        def find() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # noqa: BLE001 -- who asks gets it
                answer.set_exception(error)

        with self._turn:
            if self._asked is not None:
                self._asked.exception(self._limit_s)
            self._asked = answer
            threading.Thread(target=find, name="disttrain-device-probe", daemon=True).start()
        return answer.result(self._limit_s)


def has_stream_ended(index: int) -> bool:
    """True if GPU `index` has come to the end of its default stream. Raises: RuntimeError when it has failed."""
    with beside_captures():
        _call("cudaSetDevice", ctypes.c_int(index))
        return _call("cudaStreamQuery", None) != _NOT_READY


def has_passed(event: torch.Event) -> bool:
    """True if the device has come to an event that was recorded. Raises: RuntimeError when it has failed."""
    return _call("cudaEventQuery", ctypes.c_void_p(event.event_id)) != _NOT_READY


def elapsed_ms(begin: torch.Event, end: torch.Event) -> float:
    """The time between two events that have been passed. Raises: RuntimeError, as when they are of different
    devices."""
    taken_ms = ctypes.c_float()
    events = ctypes.c_void_p(begin.event_id), ctypes.c_void_p(end.event_id)
    if _call("cudaEventElapsedTime", ctypes.byref(taken_ms), *events) == _NOT_READY:
        raise RuntimeError("one of the events has been recorded again, and has not been passed")
    return taken_ms.value


def record(event: torch.Event, stream: torch.cuda.Stream) -> None:
    """Record an event again that torch has recorded before. Raises: RuntimeError when the device has failed."""
    _call("cudaSetDevice", ctypes.c_int(stream.device_index))
    _call("cudaEventRecord", ctypes.c_void_p(event.event_id), ctypes.c_void_p(stream.cuda_stream))


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread ask for streams and events while another one captures a graph, which would be spoilt otherwise.

    CUDA runtime API, cudaThreadExchangeStreamCaptureMode.
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


def _call(name: str, *arguments: object) -> int:
    # torch has loaded the runtime for all to see.
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        raise RuntimeError(f"{name}: there is no CUDA runtime")
    code = int(function(*arguments))
    if code not in (0, _NOT_READY):
        raise RuntimeError(f"{name} failed with error {code}")
    return code
