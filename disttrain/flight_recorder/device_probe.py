"""Whether a GPU's driver answers at all, asked so that nobody waits for it.

A thread that waits in the driver, as one does that makes a communicator behind a kernel that does not end, may keep
others out of it; and who calls it by torch waits with the interpreter's lock held, so that nothing of the process goes
on. Here it is called by ctypes, which gives that lock away, in a thread that may be left behind.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_LIMIT_S: Final = 0.5
"""A query takes microseconds."""
_CAPTURE_MODE_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed


class Probe:
    """Calls `query` in a thread of its own, one at a time."""

    def __init__(self, query: Callable[[], object], limit_s: float = _LIMIT_S) -> None:
        self._query, self._limit_s = query, limit_s
        self._thread: threading.Thread | None = None

    def answers(self) -> bool:
        """Whether a query comes back within the limit; False as long as an earlier one has not."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._query, name="disttrain-device-probe", daemon=True)
            self._thread.start()
        self._thread.join(self._limit_s)
        return not self._thread.is_alive()


def query_device(index: int) -> None:
    """Ask the runtime about GPU `index`'s default stream; the answer does not matter.

    CUDA runtime API, "Stream Management". torch has loaded the runtime for all to see; without it, nothing is asked.
    """
    runtime = ctypes.CDLL(None)
    if not hasattr(runtime, "cudaStreamQuery"):
        return
    with beside_captures():
        runtime.cudaSetDevice(ctypes.c_int(index))
        runtime.cudaStreamQuery(None)


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
