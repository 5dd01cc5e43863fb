"""Connecting a group at its first use, without waiting for calls of the other members.

A rank that waits for others to connect asks them, through the witness of each; they connect in a thread of their own,
whatever their main thread does. So it doesn't matter in which order ranks first use their groups, nor whether all of
them use one. Who has not made the group yet makes it in advance: its name says which one it will be.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from disttrain._python import at_exit
from disttrain._python.awaited_threads import AWAITED
from disttrain.errors import BackendError
from disttrain.process_group.backends import choose_backends
from disttrain.process_group.group import ProcessGroup
from disttrain.ranks import Ranks

if TYPE_CHECKING:
    from disttrain.process_group.home import HomeWorld

_CLOSING_S: Final = 1.0


class Connecting:
    """Connects groups of a world on the request of other ranks."""

    def __init__(self, world: HomeWorld) -> None:
        self._world = world
        self._in_advance: dict[str, ProcessGroup] = {}
        self._made: set[str] = set()
        self._threads: list[tuple[ProcessGroup, threading.Thread]] = []
        self._starting = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()
        self.lock = threading.Lock()

    def stay(self) -> None:
        """Have it closed when this process ends, also without destroying its world."""
        at_exit.register(self.close)

    def hear(self, request: dict[str, Any]) -> None:
        """Another rank asks; this one connects beside whatever it does."""
        if self._world.rank not in Ranks.from_plain(request["ranks"]):
            return
        group = self._group(request)
        if group is None or group.is_connected(request["device_type"]):
            return
        with self._starting:
            if self._is_closed:
                return  # Another rank asks while this one ends.
            connect = partial(group.connect_beside, request["device_type"])
            thread = AWAITED.start(connect, "disttrain connecting")
            self._threads = [(group, other) for group, other in self._threads if other.is_alive()]
            if thread is not None:
                self._threads.append((group, thread))

    def make(
        self, name: str, ranks: Ranks, backend: str | None, timeout_s: float, options: object | None
    ) -> ProcessGroup:
        """The group of this name, for who holds `lock`: a new one, or the one that was made in advance."""
        kinds = choose_backends(backend)
        self._made.add(name)
        group = self._in_advance.pop(name, None)
        if group is None or not group.takes_over(kinds, timeout_s, options):
            group = ProcessGroup(self._world, name, ranks, kinds, timeout_s, options)
        return group

    def close(self) -> None:
        """End the threads; what they connect is not needed any more. Idempotent."""
        at_exit.unregister(self.close)
        if os.getpid() != self._pid:
            return  # A child that was forked off is no rank.
        with self._starting:
            self._is_closed = True
            threads, self._threads = self._threads, []
        for group, thread in threads:
            if thread.is_alive():
                group.abort()
                thread.join(_CLOSING_S)
        for group in self._in_advance.values():
            group.shutdown(0.0)
        self._in_advance.clear()

    def _group(self, request: dict[str, Any]) -> ProcessGroup | None:
        """The group that is asked for; None where it has been destroyed, or cannot be had."""
        name = request["connect"]
        with self.lock:
            if name in self._made:
                group = self._world.group_named(name)
                return group if isinstance(group, ProcessGroup) else None
            if name not in self._in_advance:
                with suppress(BackendError):  # a backend that is not there: this rank will say so itself
                    kinds = choose_backends(request["backend"])
                    ranks = Ranks.from_plain(request["ranks"])
                    self._in_advance[name] = ProcessGroup(self._world, name, ranks, kinds, request["timeout_s"], None)
            return self._in_advance.get(name)
