"""Tells the other ranks that this one's script has failed where threads that are no daemons keep its process.

Python then runs on until those have ended, perhaps for ever: connections stay open, `atexit` does not come, and no rank
that waits for this one would learn of it before its timeout. A script that has ended well, or by `sys.exit`, may go on
in its threads, so that there only a warning says what keeps the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, Protocol

from disttrain._python.main_thread import kept_by, when_main_ends
from disttrain.process_group.interfaces import WorldLike

if TYPE_CHECKING:
    from disttrain.process_group.watching.refusals import Refusals

_log = logging.getLogger(__name__)

_GRACE_S: Final = 2.0
"""The time that threads may take to see that the script has ended."""
_MAX_NAMED: Final = 4


class RefusingWorld(WorldLike, Protocol):
    """A world whose ranks tell each other what they cannot come to."""

    refusals: Refusals


class ScriptEnd:
    """Waits for the end of this process's script until it is closed, in a thread: none can be started by then."""

    def __init__(self, world: RefusingWorld) -> None:
        self._world = weakref.ref(world)
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._is_closed = False
        self._wake = threading.Event()
        threading.Thread(target=self._watch, name="disttrain script end", daemon=True).start()
        when_main_ends(self._note)

    def close(self) -> None:
        """Wait no longer. Idempotent."""
        self._is_closed = True
        self._wake.set()

    def _note(self, error: BaseException | None) -> None:
        # Where nothing keeps the process, it is about to end: no thread is to wake while the interpreter goes.
        if os.getpid() == self._pid and kept_by():
            self._error = error
            self._wake.set()

    def _watch(self) -> None:
        self._wake.wait()
        end_s = time.monotonic() + _GRACE_S
        for thread in () if self._is_closed else kept_by():
            thread.join(max(0.0, end_s - time.monotonic()))
        world = self._world()
        if self._is_closed or world is None or not (threads := kept_by()):
            return
        names = [thread.name for thread in threads[:_MAX_NAMED]] + ["..."] * (len(threads) > _MAX_NAMED)
        how = "has ended" if self._error is None else f"has failed ({type(self._error).__name__})"
        said = "the script of rank %d %s, but threads that are no daemons keep its process: %s"
        _log.warning(said, world.rank, how, ", ".join(names))
        if isinstance(self._error, Exception):
            for group in world.groups:
                world.refusals.end(group, "to go on", self._error)
