"""Hears SIGTERM and SIGUSR1, by which schedulers say that a job has to go, and tells the worlds that want to know.

A rank often waits in a transport's C++ code, where Python runs no signal handlers. So the signals are handled as by
`faulthandler`, in C: the handler writes into a pipe, and a thread that reads from it does the rest.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import threading
import weakref
from contextlib import suppress
from typing import Final, Protocol

from disttrain.reports import ENDING, NOTICED, own_mark, say_asks

NOTICES: Final = (signal.SIGTERM, signal.SIGUSR1)


class Listener(Protocol):
    """One that is to hear of it."""

    def request(self, reason: str) -> bool:
        """A notice has come, as `reason` says. False: nobody could be told."""
        ...


class StopSignals:
    """The notices to this process, from the first `listen` on."""

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_catching = False
        self._reason = ""

    def listen(self, listener: Listener) -> None:
        """Tell `listener` when a notice comes, in a thread, or now where one has come before."""
        with self._lock:
            self._listeners.add(listener)
            if not self._is_catching:
                self._is_catching = True
                self._catch()
            reason = self._reason
        if reason:
            listener.request(reason)

    def _catch(self) -> None:
        signals: dict[int, int] = {}
        for number in NOTICES:
            previous = signal.getsignal(number)
            if previous is signal.SIG_IGN:
                continue  # as whoever started the process wants it
            reading, writing = os.pipe()
            # A handler must never wait, not even for a pipe that nobody empties.
            os.set_blocking(writing, False)
            is_taken = previous not in (signal.SIG_DFL, None)
            faulthandler.register(number, file=writing, all_threads=False, chain=is_taken)
            signals[reading] = number
        os.register_at_fork(after_in_child=self._let_go)
        say_asks()
        # After the handlers: a launcher marks the page before it looks for them.
        if own_mark() == NOTICED:
            self._reason = f"a notice to the launcher on {socket.gethostname()}"
        threading.Thread(target=self._read, args=(signals,), name="disttrain stop signals", daemon=True).start()

    def _read(self, signals: dict[int, int]) -> None:
        poll = select.poll()
        for reading in signals:
            poll.register(reading, select.POLLIN)
        while True:
            for reading, _ in poll.poll():
                os.read(reading, 1 << 16)
                self._came(signals[reading])

    def _came(self, number: int) -> None:
        if own_mark() == ENDING:
            _act_as_before(number)
            return
        with self._lock:
            if self._reason:
                return  # Schedulers signal all processes of a job, and the launcher passes it on.
            self._reason = f"{signal.Signals(number).name} to a rank on {socket.gethostname()}"
            listeners = list(self._listeners)
        agreed = [listener.request(self._reason) for listener in listeners]
        # Where no rank listens any more, or the ranks cannot agree since one of them is gone, it is as without us.
        if not agreed or not all(agreed):
            _act_as_before(number)

    def _let_go(self) -> None:
        """In a process that was forked off: a parent that ends it by SIGTERM, as multiprocessing does, means it alone.

        SIGUSR1 a scheduler sends to all processes of a job.
        """
        for number in NOTICES:
            faulthandler.unregister(number)
        self._listeners, self._lock = weakref.WeakSet(), threading.Lock()
        self._is_catching, self._reason = False, ""
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _act_as_before(number: int) -> None:
    """Does what the signal would have done without a handler of ours; SIGUSR1 is no order to end."""
    if number == signal.SIGTERM:
        faulthandler.unregister(number)
        os.kill(os.getpid(), number)


STOP_SIGNALS: Final = StopSignals()
