"""Tells the other ranks that this one's script has failed where threads that are no daemons keep its process.

Python then runs on until those have ended, perhaps for ever: connections stay open, `atexit` does not come, and no rank
that waits for this one would learn of it before its timeout. A script that has ended well, or by `sys.exit`, may go on
in its threads, so that there only a warning says what keeps the process.
"""

from __future__ import annotations

import logging
import os
import threading
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


class WatchedWorld(WorldLike, Protocol):
    """A world whose ranks tell each other what they cannot come to."""

    refusals: Refusals


def watch_script(world: WatchedWorld) -> None:
    """Watch this process's script until `world` is gone."""
    watched, pid = weakref.ref(world), os.getpid()

    def ended(error: BaseException | None) -> None:
        if os.getpid() == pid and kept_by():
            timer = threading.Timer(_GRACE_S, _look, (watched, error))
            timer.daemon = True
            timer.start()

    when_main_ends(ended)


def _look(watched: weakref.ref[WatchedWorld], error: BaseException | None) -> None:
    threads, world = kept_by(), watched()
    if not threads or world is None or world.witness is None or not world.groups:
        return
    names = ", ".join(thread.name for thread in threads[:_MAX_NAMED]) + (", ..." if len(threads) > _MAX_NAMED else "")
    how = "has ended" if error is None else f"has failed ({type(error).__name__})"
    _log.warning(
        "the script of rank %d %s, but threads that are no daemons keep its process: %s", world.rank, how, names
    )
    if isinstance(error, Exception):
        for group in world.groups:
            world.refusals.end(group, "to go on", error)
