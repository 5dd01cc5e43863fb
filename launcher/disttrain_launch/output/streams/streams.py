"""Streams of many processes, and the screen they share, as part of an event loop."""

from __future__ import annotations

import selectors

from disttrain_launch.output.streams.logs import StreamPump
from disttrain_launch.output.terminal.screen import Outlet, Screen, make_screens
from disttrain_launch.request.job import STDERR, STDOUT


class Streams:
    """Pumps and screens, registered with the loop's `selector`: the loop calls `balance` before it waits, and `move`
    for every ready pump or outlet. A process is known by a number that the loop chooses."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.screens: dict[int, Screen] = make_screens()
        self._outlets = {screen.outlet for screen in self.screens.values()}
        self._pumps: dict[tuple[int, int], StreamPump] = {}
        self._is_paused = False

    def show_held(self) -> None:
        """Show what is held back to be folded."""

    def add_pump(self, process: int, stream: int, pump: StreamPump) -> None:
        """Move this stream from now on."""
        self._pumps[process, stream] = pump
        self._selector.register(pump.fd, selectors.EVENT_READ, pump)

    def move(self, ready: StreamPump | Outlet) -> None:
        """Move bytes of a pump or outlet that the selector found ready."""
        if isinstance(ready, Outlet):
            ready.flush(0)
            return
        ready.read_some()
        if ready.is_over:
            self._selector.unregister(ready.fd)
            ready.close()

    def balance(self) -> None:
        """Read no more than the screen takes; wait for the screen only while something waits for it."""
        registered = self._selector.get_map()
        for outlet in self._outlets:
            if outlet.is_waiting and outlet.fd not in registered:
                self._selector.register(outlet.fd, selectors.EVENT_WRITE, outlet)
            elif not outlet.is_waiting and outlet.fd in registered:
                self._selector.unregister(outlet.fd)
        if any(outlet.is_congested for outlet in self._outlets):
            self._pause()
        elif self._is_paused and not any(outlet.is_waiting for outlet in self._outlets):
            self._resume()

    def drain(self, process: int) -> str:
        """Move what an ended process left in its pipes; returns the end of its stderr."""
        for stream in (STDOUT, STDERR):
            self._pumps[process, stream].drain()
        return self._pumps[process, STDERR].tail

    def say(self, text: str) -> None:
        """A message of the launcher's own, whole lines, after what processes have printed so far."""
        if text:
            self.show_held()
            self.screens[STDERR].show_lines(text.encode("utf-8", "replace"))

    def end_all(self) -> None:
        """Move the rest; the processes are gone. Others may follow."""
        for pump in self._pumps.values():
            if pump.fd in self._selector.get_map():
                self._selector.unregister(pump.fd)
            pump.drain()
            pump.close()
        self._pumps.clear()
        self._is_paused = False
        self.show_held()
        for screen in self.screens.values():
            screen.restore()

    def flush(self, wait_ms: int | None = None) -> None:
        """Wait until the screen has taken everything, or nothing for `wait_ms`."""
        for outlet in self._outlets:
            outlet.flush(wait_ms)

    def _pause(self) -> None:
        if self._is_paused:
            return
        self._is_paused = True
        for pump in self._pumps.values():
            if not pump.is_over:
                self._selector.unregister(pump.fd)

    def _resume(self) -> None:
        self._is_paused = False
        for pump in self._pumps.values():
            if not pump.is_over:
                self._selector.register(pump.fd, selectors.EVENT_READ, pump)
