"""What makes a rank write its dump: SIGUSR2, an exception that ends the process, its normal end.

A rank that hangs sits in a transport's C++ code, where Python runs no signal handlers. So the signal goes the way of
`faulthandler`, whose handler is C: it writes into a pipe, and a thread that reads from it makes the dump.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType

from disttrain.errors import DisttrainError, SettingError
from disttrain.flight_recorder.recorder import FlightRecorder
from disttrain.process_group import World, current_world
from disttrain.settings import FLIGHT_DIR

_log = logging.getLogger(__name__)


def enable(world: World | None = None) -> FlightRecorder:
    """Record `world` (default: this process's) from now on; a second call for the same world changes nothing.

    With DISTTRAIN_FLIGHT_DIR set, the rank writes a dump there on SIGUSR2, on an uncaught exception and when it ends.
    Call it after init_process_group, on every rank, before the first collective.
    Raises: GroupError before init_process_group, SettingError when the folder cannot be made.
    """
    world = current_world("flight_recorder.enable") if world is None else world
    for observer in world.observers:
        if isinstance(observer, FlightRecorder):
            return observer
    folder = FLIGHT_DIR.read()
    if folder is not None:
        _make_folder(folder, world)
    recorder = FlightRecorder()
    recorder.attach(world)
    if folder is not None:
        Triggers(recorder, folder).install()
    return recorder


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
            self._dump("SIGUSR2")

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
