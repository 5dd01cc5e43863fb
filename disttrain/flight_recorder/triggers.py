"""What makes a rank write its dump: SIGUSR2, an exception that ends the process, its normal end.

A rank that hangs sits in a transport's C++ code, where Python runs no signal handlers. So the signal goes the way of
`faulthandler`, whose handler is C: it writes into a pipe, and a thread that reads from it makes the dump.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import logging
import os
import signal
import stat
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Final

from disttrain.errors import DisttrainError, SettingError
from disttrain.flight_recorder.folders import private_folder
from disttrain.flight_recorder.recorder import FlightRecorder
from disttrain.flight_recorder.ring import remove_stale
from disttrain.flight_recorder.watchdog import Watchdog
from disttrain.process_group import World, current_world
from disttrain.settings import FLIGHT_DIR, FLIGHT_ENDS_JOB, FLIGHT_SOFT_LIMIT_S

_log = logging.getLogger(__name__)

_MAX_SOFT_LIMIT_S: Final = 60.0
_KEPT_S: Final = 86400.0
"""How long what a dead process has left in the private folder stays there."""


def enable(world: World | None = None) -> FlightRecorder:
    """Record `world` (default: this process's) from now on; a second call for the same world changes nothing.

    The ring is a file in DISTTRAIN_FLIGHT_DIR, else in a private folder, until the world is destroyed. A watchdog has
    all ranks dump when one of them waits for longer than DISTTRAIN_FLIGHT_SOFT_LIMIT_S. With DISTTRAIN_FLIGHT_DIR set,
    the rank writes a dump there on SIGUSR2, on an uncaught exception and when it ends, too.
    Call it after init_process_group, on every rank, before the first collective.
    Raises: GroupError before init_process_group, SettingError when the folder cannot be made.
    """
    world = current_world("flight_recorder.enable") if world is None else world
    if isinstance(world.recorder, FlightRecorder):
        return world.recorder
    asked_folder = FLIGHT_DIR.read()
    if asked_folder is not None:
        _make_folder(asked_folder, world)
    recorder = FlightRecorder()
    try:
        folder = asked_folder or _made_private_folder()
        recorder.attach(world, folder)
    except OSError as problem:
        _log.warning("the flight recorder keeps its records in memory only: %s", problem)
        recorder.attach(world)
    else:
        soft_limit_s = FLIGHT_SOFT_LIMIT_S.read() or min(world.timeout_s / 4, _MAX_SOFT_LIMIT_S)
        watchdog = Watchdog(recorder, folder, soft_limit_s, ends_job=FLIGHT_ENDS_JOB.read())
        recorder.when_closed(watchdog.close)
        recorder.when_closed(lambda: atexit.unregister(recorder.close))
    if asked_folder is not None:
        Triggers(recorder, asked_folder).install()
    else:
        atexit.register(recorder.close)
    return recorder


def _made_private_folder() -> Path:
    """This user's own, without what dead processes have left there long ago. Raises OSError when it is another's."""
    folder = private_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "is not this user's alone", str(folder))
    remove_stale(folder, _KEPT_S)
    return folder


_SIGNAL: Final = "SIGUSR2"


class Triggers:
    """Makes `recorder` dump into `folder` when something happens to this process. One for a process is enough."""

    def __init__(self, recorder: FlightRecorder, folder: Path) -> None:
        self._recorder = recorder
        self._folder = folder
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        self._has_failed = False

    def install(self) -> None:
        reading, writing = os.pipe()
        # A handler must never wait, not even for a pipe that nobody empties.
        os.set_blocking(writing, False)
        previous = signal.getsignal(signal.SIGUSR2)
        is_taken = previous not in (signal.SIG_DFL, signal.SIG_IGN, None)
        faulthandler.register(signal.SIGUSR2, file=writing, all_threads=False, chain=is_taken)
        threading.Thread(
            target=self._dump_on_signal, args=(reading,), name="disttrain flight recorder", daemon=True
        ).start()
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)

    def _dump_on_signal(self, reading: int) -> None:
        while os.read(reading, 1 << 16):
            self._dump(_SIGNAL)

    def _on_exception(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        self._has_failed = True
        self._dump("uncaught exception", error)
        self._previous_hook(kind, error, where)

    def _on_exit(self) -> None:
        if not self._has_failed:
            self._dump("exit")

    def _dump(self, reason: str, error: BaseException | None = None) -> None:
        # A child that was forked off shares the hooks, but is no rank.
        if os.getpid() != self._pid:
            return
        try:
            self._recorder.dump(self._folder, reason, error)
            if reason != _SIGNAL:
                self._recorder.close()  # The dump says all that the ring does.
        except (OSError, DisttrainError) as problem:
            _log.error("the flight recorder cannot write its dump: %s", problem)


def _make_folder(folder: Path, world: World) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            "flight_recorder.enable",
            f"{FLIGHT_DIR.name}={str(folder)!r} cannot be made: {error.strerror}.",
            "Name a folder that every rank may write to, or unset it.",
            rank=world.rank,
        ) from None
