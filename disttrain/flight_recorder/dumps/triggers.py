"""Writes a rank's dump on SIGUSR2, on an exception that ends the process, and at the end of its world.

A rank that hangs is in a transport's C++ code, where Python runs no signal handlers. So the signal is handled as by
`faulthandler`, in C: the handler writes into a pipe, and a thread that reads from it makes the dump.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

from disttrain._python import at_exit
from disttrain.errors import DisttrainError, StoreError
from disttrain.flight_recorder.dumps.folders import made_private_folder, private_folder
from disttrain.flight_recorder.dumps.rings.orphaned_rings import remove_forgotten
from disttrain.flight_recorder.dumps.words import EXCEPTION, EXIT, UNCAUGHT_EXCEPTION
from disttrain.flight_recorder.live.watchdog import Watchdog
from disttrain.flight_recorder.record.recall import main_place, recall
from disttrain.flight_recorder.record.recorder import FlightRecorder
from disttrain.process_group import World, current_world
from disttrain.settings import FLIGHT_DIR, FLIGHT_ENDS_JOB, FLIGHT_MARKS, FLIGHT_RING_DIR, FLIGHT_SOFT_LIMIT_S

_log = logging.getLogger(__name__)

_SIGNAL: Final = "SIGUSR2"
_MIN_SOFT_LIMIT_S: Final = 2.0
_MAX_SOFT_LIMIT_S: Final = 60.0
_MAX_TRIES: Final = 10
_SILENT_S: Final = 60.0
"""Without a sign of life, for another rank's records to be kept when this one fails."""


def enable(world: World | None = None) -> FlightRecorder:
    """Record `world` (default: this process's) from now on; where that is done already, nothing changes.

    Each job records from init_process_group on, unless DISTTRAIN_FLIGHT_RECORDER says otherwise: then call this after
    it, on every rank, before the first collective. It also finds the recorder that is there.

    The ring is a file in DISTTRAIN_FLIGHT_RING_DIR, else in a private folder, until the world is destroyed. A watchdog
    has all ranks dump when one of them waits for longer than DISTTRAIN_FLIGHT_SOFT_LIMIT_S. With DISTTRAIN_FLIGHT_DIR
    set, the rank writes a dump there on SIGUSR2, on an uncaught exception and at its world's end, too. What cannot be
    had, such as a file where the disk is full, is left out with a warning.
    Raises: GroupError before init_process_group, SettingError for a setting that cannot be.
    """
    world = current_world("flight_recorder.enable") if world is None else world
    if isinstance(world.recorder, FlightRecorder):
        return world.recorder
    soft_limit_s = FLIGHT_SOFT_LIMIT_S.read() or min(max(world.timeout_s / 4, _MIN_SOFT_LIMIT_S), _MAX_SOFT_LIMIT_S)
    ends_job = FLIGHT_ENDS_JOB.read()
    asked_folder = _made_requested_folder()
    recorder = FlightRecorder(marks_device=FLIGHT_MARKS.read())
    try:
        rings = _attach_in_folder(recorder, world, asked_folder)
        folder = asked_folder or rings
        recorder.when_closed(Watchdog(recorder, folder, rings, soft_limit_s, ends_job=ends_job).close)
        if asked_folder is not None:
            recorder.when_closed(Triggers(recorder, asked_folder, rings).close)
    except (OSError, StoreError) as problem:
        # As text, here and elsewhere: a handler that keeps its records would keep the recorder by the traceback.
        _log.warning("the flight recorder may watch for no hangs, and write no files: %s", str(problem))
        recorder.attach(world)
    world.recall, world.main_place = partial(recall, recorder), main_place
    at_exit.register(recorder.close)
    recorder.when_closed(lambda: at_exit.unregister(recorder.close))
    recorder.when_closed(partial(_leave_private_folder, recorder))
    return recorder


def _attach_in_folder(recorder: FlightRecorder, world: World, asked_folder: Path | None) -> Path:
    """Attach with a ring on this machine. Returns: the folder that it is in. Raises OSError, StoreError."""
    if (rings := FLIGHT_RING_DIR.read()) is not None:
        rings.mkdir(parents=True, exist_ok=True)
        recorder.attach(world, rings, asked_folder)
        return rings
    for _ in range(_MAX_TRIES):
        rings = made_private_folder()
        # Repeated if the last of the other ranks has just removed the folder.
        with suppress(FileNotFoundError):
            remove_forgotten(rings)
            recorder.attach(world, rings, asked_folder)
            return rings
    raise FileNotFoundError(errno.ENOENT, "is removed again and again", str(rings))


def _leave_private_folder(recorder: FlightRecorder) -> None:
    recorder.ring.close()
    with suppress(OSError):  # Others are in it, or have left something.
        private_folder().rmdir()


def _made_requested_folder() -> Path | None:
    """DISTTRAIN_FLIGHT_DIR; None when it is unset, or cannot be made: one rank must not fail for that."""
    folder = FLIGHT_DIR.read()
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        _log.warning(
            "%s=%r cannot be made: %s. Name a folder that every rank may write to.",
            FLIGHT_DIR.name,
            str(folder),
            problem.strerror,
        )
        return None
    return folder


class Triggers:
    """Makes `recorder` dump into `folder` when something happens to this process, or its world ends.

    Where it fails, because another process is gone perhaps, it keeps what such processes have in `rings`.
    Raises OSError when there are too many open files.
    """

    def __init__(self, recorder: FlightRecorder, folder: Path, rings: Path) -> None:
        self._recorder = recorder
        self._folder = folder
        self._rings = rings
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        self._is_done = False
        # The handler writes one line for each signal, so the dump of a signal may still be in progress, or waiting,
        # when the last dump is made.
        self._dumping = threading.Lock()
        self._reading, self._writing = os.pipe()
        # A handler must never wait, not even for a full pipe.
        os.set_blocking(self._writing, False)
        self._previous_handler = signal.getsignal(signal.SIGUSR2)
        is_taken = self._previous_handler not in (signal.SIG_DFL, signal.SIG_IGN, None)
        faulthandler.register(signal.SIGUSR2, file=self._writing, all_threads=False, chain=is_taken)
        threading.Thread(target=self._dump_on_signal, name="disttrain flight recorder", daemon=True).start()
        sys.excepthook = self._on_exception

    def close(self) -> None:
        """The world ends: dump what it was, and leave signal and hook to those who had them before."""
        if os.getpid() != self._pid:
            return  # A child that was forked off shares the hooks, but is no rank.
        with self._dumping:
            is_done, self._is_done = self._is_done, True
            if not is_done:
                # `finally: destroy_process_group()` comes before the hook.
                error = sys.exc_info()[1]
                self._dump(EXIT if error is None else EXCEPTION, error)
        # Launchers signal every process that has a ring; without the handler the signal would end the process.
        self._recorder.ring.close()
        # Python does not see faulthandler's handlers: another one than before was installed over it, and stays.
        if signal.getsignal(signal.SIGUSR2) == self._previous_handler:
            faulthandler.unregister(signal.SIGUSR2)
        os.close(self._writing)
        # Somebody may have put a hook of their own before ours, which then stays and only passes on.
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook

    def _dump_on_signal(self) -> None:
        while os.read(self._reading, 1 << 16):
            with self._dumping:
                if not self._is_done:
                    self._dump(_SIGNAL)
        os.close(self._reading)

    def _on_exception(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if os.getpid() == self._pid and not self._is_done:
            with self._dumping:
                self._is_done = self._dump(UNCAUGHT_EXCEPTION, error)
            if self._is_done:
                self._recorder.close()  # The dump has all that the ring has.
            else:
                at_exit.unregister(self._recorder.close)
        self._previous_hook(kind, error, where)

    def _dump(self, reason: str, error: BaseException | None = None) -> bool:
        try:
            self._recorder.dump(self._folder, reason, error)
            if error is not None:
                # Here: it loads what reads rings, which no job needs that ends well.
                from disttrain.flight_recorder.dumps.rings.orphaned_rings import keep_silent

                keep_silent(self._rings, self._folder, _SILENT_S, self._recorder.job)
        except (OSError, DisttrainError) as problem:
            _log.error("the flight recorder cannot write its dump: %s", str(problem))
            return False
        return True
