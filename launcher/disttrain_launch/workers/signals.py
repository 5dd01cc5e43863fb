"""Signals as something to wait for: each is a byte in a pipe that the event loop reads.

Before and after the event loop there is nobody to read it; then a stop signal interrupts what runs with `SignalStop`.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Self

from disttrain_launch.workers.supervision import PASSED_SIGNALS, STOP_SIGNALS


class SignalStop(Exception):
    """A stop signal came while no event loop was running."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalPipe:
    """A context: inside it signals arrive at `fd`. `interrupts`: whether the next stop signal raises SignalStop as
    well; it is cleared by the first that does, since what that one sets off must not be interrupted by a second.

    A signal that whoever started us chose to ignore (nohup ignores SIGHUP) stays ignored, for workers too.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self.interrupts = True
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (*STOP_SIGNALS, *PASSED_SIGNALS, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._came)
        # A full pipe loses no exit: every SIGCHLD makes the agent look at all workers.
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.fd)
        os.close(self._write_fd)

    def read(self) -> list[int]:
        """The signals that came since the last call, in their order."""
        try:
            return list(os.read(self.fd, 4096))
        except BlockingIOError:
            return []

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.interrupts and number in STOP_SIGNALS:
            self.interrupts = False
            raise SignalStop(number)
