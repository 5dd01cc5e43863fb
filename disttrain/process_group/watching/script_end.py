"""Tells the other ranks that this one's script has failed where threads that are no daemons keep its process.

Python then runs on until those have ended, perhaps for ever: connections stay open, `atexit` does not come, and no rank
that waits for this one would learn of it before its timeout. A script that has ended well, or by `sys.exit`, may go on
in its threads, so that there only a warning says what keeps the process.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Final, Protocol

from disttrain._python.main_thread import MainEnd
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
    """Waits for the end of this process's script until it is closed."""

    def __init__(self, world: RefusingWorld) -> None:
        self._world = weakref.ref(world)
        # The thread that waits lies outside this package, where a thread counts as within a collective.
        self._end = MainEnd(self._tell, _GRACE_S)

    def close(self) -> None:
        """Waits no longer. Idempotent."""
        self._end.close()

    def _tell(self, error: BaseException | None, threads: list[threading.Thread]) -> None:
        if (world := self._world()) is None:
            return
        names = [thread.name for thread in threads[:_MAX_NAMED]] + ["..."] * (len(threads) > _MAX_NAMED)
        how = "has ended" if error is None else f"has failed ({type(error).__name__})"
        said = "the script of rank %d %s, but threads that are no daemons keep its process: %s"
        _log.warning(said, world.rank, how, ", ".join(names))
        if isinstance(error, Exception):
            for group in world.groups:
                world.refusals.end(group, "to go on", error)
