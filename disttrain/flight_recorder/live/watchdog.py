"""Detects that this rank waits for too long; then every rank dumps, while the job still hangs.

A rank waits when none of its calls begins or ends while one of its threads is inside a collective; or when its main
thread stays in one call into C, such as a synchronization, while its GPU has queued work. Replays of recorded steps,
which no transport watches, have the timeouts of their groups (`live/replay_limits.py`). If a thread holds the
interpreter's lock for ever, no Python thread can check. Then `faulthandler`'s thread, which is C and needs no lock,
writes all stacks to a file beside the ring, since the sign of life is missing there.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import torch

from disttrain.errors import DisttrainError, FlightDumpError, StoreError
from disttrain.flight_recorder.live.replay_limits import ReplayLimits, end_overdue
from disttrain.flight_recorder.live.stack_timer import STACK_TIMER
from disttrain.flight_recorder.record.device.probe import Probe, has_stream_ended
from disttrain.flight_recorder.record.process.symbols import PACKAGE
from disttrain.flight_recorder.record.record import BESIDE
from disttrain.flight_recorder.record.recorder import FlightRecorder
from disttrain.flight_recorder.record.ring.layout import STACKS_SUFFIX
from disttrain.store.clock import SharedClock, own_boot, serve_clock
from disttrain.store.responder import Responder

if TYPE_CHECKING:
    from disttrain.flight_recorder.analysis.analysis import Analysis

_log = logging.getLogger(__name__)

MAX_BEAT_S: Final = 5.0
_INSIDE: Final = f"{PACKAGE}process_group/"
_KEEP_AFTER_S: Final = 2.0
"""The time after the dumps at which the rings of ranks that have made none are copied."""
_VERDICT_AFTER_S: Final = 3.0
"""The time that the others have to dump before the verdict is read from the folder."""
_RANK_0_FIRST_S: Final = 1.0
"""The time by which the rank that has waited gives the verdict later than rank 0, if rank 0 cannot."""


class Waiting:
    """The time since which nothing has changed; pure. Call `look` at each beat."""

    def __init__(self) -> None:
        self._seen: object = None
        self.since_s = math.inf
        self._was_told = False

    def look(self, seen: object, waits: bool, now_s: float) -> float:
        """Seconds that the rank has waited without any change; 0 if the others have been `told` already."""
        if seen != self._seen or not waits:
            self._seen, self.since_s, self._was_told = seen, now_s, False
        return 0.0 if self._was_told else now_s - self.since_s

    def told(self) -> None:
        """Notes that the others know of this wait."""
        self._was_told = True


class Watchdog:
    """Watches `recorder`'s world until it is closed; rank 0 logs the verdict.

    Args: folder  for dumps;  rings  for stacks, where the ring is;  soft_limit_s  how long a rank may wait;
          ends_job  whether the process that has waited then ends itself, after the dumps.
    Raises OSError when the file for stacks cannot be made, StoreError when the store is out of reach.
    """

    def __init__(
        self, recorder: FlightRecorder, folder: Path, rings: Path, soft_limit_s: float, *, ends_job: bool
    ) -> None:
        self._recorder = recorder
        self._folder = folder
        self._rings = rings
        self._soft_limit_s = soft_limit_s
        self._ends_job = ends_job
        self._beat_s = min(soft_limit_s / 4, MAX_BEAT_S)
        self._inside, self._on_device = Waiting(), Waiting()
        self._replay_limits = ReplayLimits()
        self._num_stalls = 0
        self._keep_due_s = self._verdict_due_s = math.inf
        self._has_waited = False
        self._clock: SharedClock | None = None
        self._wake = threading.Event()
        self._is_closing = False
        self._pid = os.getpid()
        world = recorder.world
        self._stacks_file = rings / f"{recorder.name}{STACKS_SUFFIX}"
        self._stacks = _private_file(self._stacks_file)
        # One for all beats, so that only one thread waits for a driver that does not answer.
        self._probe = Probe()
        self._responder: Responder | None = None
        if world.world_size > 1:
            try:
                self._responder = Responder(world.store, "flight recorder", world.rank, str.encode, self._hear)
            except BaseException:
                self._remove_stacks()
                raise
            clock_store = self._responder.store
            if world.rank == 0:
                self._started(lambda: serve_clock(clock_store))
            else:
                self._clock = SharedClock(clock_store, world.rank, own_boot(), time.monotonic())
        self._thread = self._started(self._watch)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if os.getpid() != self._pid or self._is_closing:
            return
        self._is_closing = True
        self._wake.set()
        if self._responder is not None:
            self._responder.close()
        if self._thread is not threading.current_thread():
            self._thread.join(self._beat_s)
        STACK_TIMER.cancel()
        self._remove_stacks()

    def _remove_stacks(self) -> None:
        self._stacks.close()
        self._stacks_file.unlink(missing_ok=True)

    def _started(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name="disttrain flight watchdog", daemon=True)
        thread.start()
        return thread

    def _watch(self) -> None:
        self._beat()
        # Loaded here, since nobody waits for this thread, and in a hang files may be out of reach.
        from disttrain.flight_recorder.analysis.analysis import analyze
        from disttrain.flight_recorder.dumps.rings.orphaned_rings import keep_silent  # as above

        next_beat_s = time.monotonic() + self._beat_s
        while not self._is_closing:
            self._wake.wait(max(0.0, min(next_beat_s, self._keep_due_s, self._verdict_due_s) - time.monotonic()))
            self._wake.clear()
            now_s = time.monotonic()
            if now_s >= next_beat_s and not self._is_closing:
                next_beat_s = now_s + self._beat_s
                self._look(now_s)
            if now_s >= self._keep_due_s:
                self._keep_due_s = math.inf
                self._keep_others(keep_silent)
            if now_s >= self._verdict_due_s:
                self._verdict_due_s = math.inf
                self._give_verdict(analyze)

    def _look(self, now_s: float) -> None:
        self._beat()
        if self._clock is not None and (offset := self._clock.look(now_s)) is not None:
            self._recorder.describe("clock", *offset)
        for overdue in self._replay_limits.look(self._recorder.listings, now_s):
            self._dump(f"a replay of rank {self._recorder.world.rank} has not ended in time")
            end_overdue(*overdue)
        if (waited_s := self._waited_s(now_s)) >= self._soft_limit_s:
            self._inside.told()
            self._on_device.told()
            self._tell(waited_s)

    def _beat(self) -> None:
        self._recorder.ring.beat()
        if self._stacks.tell():
            # Written while this thread could not run; it can again.
            self._stacks.seek(0)
            self._stacks.truncate()
        STACK_TIMER.set(max(self._soft_limit_s, 4 * self._beat_s), self._stacks)

    def _waited_s(self, now_s: float) -> float:
        activity, device = self._recorder.ring.activity(), self._recorder.world.device
        waited_s = self._inside.look(activity, _is_inside(), now_s)
        stuck_s = self._on_device.look((activity, _main_position()), activity > 0 and device.type == "cuda", now_s)
        # Asked only after a while: a query may invalidate the capture of a CUDA graph, but a capture does not take so
        # long.
        if stuck_s >= self._soft_limit_s and self._is_busy(device) is not False:
            return max(waited_s, stuck_s)
        return waited_s

    def _tell(self, waited_s: float) -> None:
        """Let all ranks know; of several that find out at once, the first speaks for all."""
        number = self._num_stalls + 1
        rank = self._recorder.world.rank
        notice = json.dumps({"rank": rank, "number": number, "waited_s": round(waited_s, 1)}).encode()
        if self._responder is None or not self._responder.tell(notice, f"stall {number}"):
            self._hear(notice)

    def _hear(self, notice: bytes) -> bool:
        said = json.loads(notice)
        self._num_stalls = max(self._num_stalls, said["number"])
        reason = f"rank {said['rank']} has waited for {said['waited_s']:.0f} s"
        self._dump(reason)
        rank = self._recorder.world.rank
        self._has_waited |= said["rank"] == rank
        if self._has_waited:
            _log.warning("%s; all ranks dump to %s, and `disttrain-flight` says why", reason, self._folder)
        self._keep_due_s = time.monotonic() + _KEEP_AFTER_S
        if self._has_waited or rank == 0:
            self._verdict_due_s = time.monotonic() + _VERDICT_AFTER_S + (_RANK_0_FIRST_S if rank else 0.0)
        self._wake.set()
        return True

    def _keep_others(self, keep_silent: Callable[[Path, Path, float, str], None]) -> None:
        """Copies the rings of ranks of this machine that cannot dump to the folder of dumps."""
        try:
            keep_silent(self._rings, self._folder, self._soft_limit_s / 2, self._recorder.job)
        except OSError as problem:
            _log.error("the flight recorder cannot keep other ranks' records: %s", str(problem))

    def _dump(self, reason: str) -> None:
        try:
            self._recorder.dump(self._folder, reason, device_is_busy=self._device_is_busy())
        except (OSError, DisttrainError) as problem:
            _log.error("the flight recorder cannot write its dump: %s", str(problem))

    def _device_is_busy(self) -> bool | None:
        """Asked of a rank whose host has stood still only: a query may spoil the capture of a CUDA graph."""
        device = self._recorder.world.device
        if device.type != "cuda" or time.monotonic() - self._on_device.since_s < self._soft_limit_s / 2:
            return None
        return self._is_busy(device)

    def _is_busy(self, device: torch.device) -> bool | None:
        """True if its default stream has work left; None where the device has failed."""
        try:
            return not self._probe.ask(partial(has_stream_ended, device.index or 0))
        except TimeoutError:
            return True  # Another thread waits in the driver for queued work, and blocks others.
        except RuntimeError:
            return None

    def _give_verdict(self, analyze: Callable[[Path, str], Analysis]) -> None:
        if self._is_first():
            try:
                analysis = analyze(self._folder, self._recorder.job)
            except FlightDumpError as error:
                _log.error("%s", str(error))
            else:
                num_dumps, world_size = len(analysis.dumps), self._recorder.world.world_size
                summary = analysis.verdicts[0].summary
                _log.warning("from the dumps of %d of %d ranks: %s", num_dumps, world_size, summary)
        if self._ends_job and self._has_waited:
            _log.error("the flight recorder ends this process, since DISTTRAIN_FLIGHT_ENDS_JOB is set")
            logging.shutdown()
            sys.stderr.flush()
            os._exit(1)

    def _is_first(self) -> bool:
        """True for the one rank that gives this stall's verdict; for each that does where the store is gone."""
        rank = str(self._recorder.world.rank)
        try:
            store = None if self._responder is None else self._responder.store
            return store is None or store.compare_set(f"verdict/{self._num_stalls}", "", rank).decode() == rank
        except StoreError:
            return True


def _main_position() -> tuple[int, int]:
    """The position of the main thread: its innermost frame, and the instruction there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)


def _is_inside() -> bool:
    """True when some thread is inside a collective or message, or connecting for its first."""
    beside = {thread.ident for thread in threading.enumerate() if thread.name.startswith(BESIDE)}
    for ident, innermost in sys._current_frames().items():
        frame = None if ident in beside else innermost
        while frame is not None:
            if frame.f_code.co_filename.startswith(_INSIDE):
                return True
            frame = frame.f_back
    return False


def _private_file(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "w+b", buffering=0)
