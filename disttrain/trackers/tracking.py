"""Feeds trackers: each rank's reports go to rank 0 through the store, where they are put together step by step."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgpack

from disttrain import reports
from disttrain._python import at_exit
from disttrain.errors import SettingError, StoreError, StoreTimeoutError
from disttrain.process_group import World, current_world, is_initialized
from disttrain.store import HashStore, PrefixStore, Store
from disttrain.trackers.outlet import Outlet
from disttrain.trackers.run_ids import RunIds
from disttrain.trackers.steps import HOLD_S, Entry, Steps
from disttrain.trackers.summaries import summary_numbers
from disttrain.trackers.tracker import Numbers, Tracker

_log = logging.getLogger(__name__)

_QUEUE: Final = "reports"
_SEND_S: Final = 1.0
"""The interval at which a rank sends what it has reported."""
_IDLE_S: Final = 3600.0
_MAX_WAITING: Final = 10_000
_CLOSING_S: Final = 10.0
"""The time that the last reports may take through the store."""
_LAST_NUMBERS_S: Final = 30.0
"""The time that a tracker which has begun may take to send the last numbers."""


def track(
    *trackers: Tracker,
    folder: Path | str | None = None,
    first_step: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Tracking:
    """Pass what all ranks `report` on to `trackers`, until the result is closed: by `with`, or as the job ends.

    Each rank calls it, after init_process_group, with trackers alike; rank 0 opens them. There, numbers of one step are
    put together as in the launcher's table: the sum of `..._per_s`, the mean of others. A process that is no rank of a
    job may call it, too. No rank waits: a tracker that fails or is slow loses numbers, and says once that it does.

    Args: folder  where the checkpoints are: the runs' ids are kept there, in trackers.json;
          first_step  the steps that the loaded checkpoint has behind it: beyond 0 the runs of these ids go on, and what
                      they have from that step on is done again;
          config  is shown with a new run.
    Raises: SettingError for two trackers of one name.
    """
    names = [tracker.name for tracker in trackers]
    if len(set(names)) < len(names):
        raise SettingError("track", f"of {', '.join(names)}, two have one name.", "Give each a name of its own.")
    world = current_world("track") if is_initialized() else None
    tracking = Tracking(trackers, world, RunIds(folder, goes_on=first_step > 0), first_step, dict(config or {}))
    if trackers:
        tracking.start()
    return tracking


class Tracking:
    """Trackers that are being fed; see `track`."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        world: World | None,
        run_ids: RunIds,
        first_step: int,
        config: Mapping[str, Any],
    ) -> None:
        self._trackers = trackers
        self._world = world
        self._run_ids = run_ids
        self._first_step = first_step
        self._config = config
        self._rank, self._world_size = (0, 1) if world is None else (world.rank, world.world_size)
        self._outlets: list[Outlet] = []
        self._told: queue.Queue[Entry] = queue.Queue(_MAX_WAITING)
        self._num_lost = 0
        self._step: int | None = None
        self._numbers: dict[str, float] = {}
        self._time_s = 0.0
        self._num_reports = 0
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()

    def start(self) -> None:
        """Hear reports from now on."""
        self._store: Store = PrefixStore("trackers", HashStore() if self._world is None else self._world.store)
        if self._rank == 0:
            self._outlets = [
                Outlet(tracker, self._run_ids.of(tracker.name), self._first_step, self._config, self._run_ids.keep)
                for tracker in self._trackers
            ]
            self._receiving = self._store.listener()
            self._threads.append(threading.Thread(target=self._collect, name="disttrain reports", daemon=True))
        self._threads.append(threading.Thread(target=self._send, name="disttrain reports", daemon=True))
        self._sending = self._store.listener()
        for thread in self._threads:
            thread.start()
        if self._world is not None:
            self._world.companion(_OfWorld, _OfWorld).trackings.append(self)
        at_exit.register(self.close)
        reports.add_listener(self)

    def heard(self, step: int | None, numbers: dict[str, float]) -> None:
        """See `reports.Listener`. Numbers of one step may come in several reports: they go when the next one begins."""
        if self._world is not None and (not is_initialized() or current_world() is not self._world):
            return  # of a rank that is another thread
        at = step if step is not None else self._num_reports if self._step is None else self._step
        self._num_reports += step is None and self._step is None
        if step is None and self._step is None:
            self._put((at, time.time(), numbers))
            return
        if at != self._step:
            self._put_step()
            self._step = at
        self._numbers.update(numbers)
        self._time_s = time.time()

    def take_summary(self, summary: Mapping[str, Any]) -> None:
        """A hook for `StepSummaries`: the times of steps, by mesh axis and rank."""
        self.write(self._first_step + summary["step"], summary_numbers(summary))

    def write(self, step: int, numbers: Numbers) -> None:
        """Give numbers to the trackers at once, on rank 0; elsewhere do nothing."""
        for outlet in self._outlets:
            outlet.put(numbers, step, time.time())

    def close(self) -> None:
        """Let the trackers have all that was reported, and end. Idempotent."""
        at_exit.unregister(self.close)
        reports.remove_listener(self)
        threads, self._threads = self._threads, []
        if not threads or os.getpid() != self._pid:
            return
        self._put_step()
        self._ending.set()
        threads[-1].join(_CLOSING_S)
        if self._rank == 0:
            threads[0].join(HOLD_S + _CLOSING_S)
            self._receiving.close()
        self._sending.close()
        for outlet in self._outlets:
            outlet.close(_LAST_NUMBERS_S)
        if self._num_lost:
            _log.warning("rank %d has lost %d steps for the trackers", self._rank, self._num_lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put_step(self) -> None:
        if self._step is not None and self._numbers:
            self._put((self._step, self._time_s, self._numbers))
        self._numbers = {}

    def _put(self, entry: Entry) -> None:
        try:
            self._told.put_nowait(entry)
        except queue.Full:
            self._num_lost += 1

    def _send(self) -> None:
        """Send what has been reported, about once a second: so many messages come to the store, however short steps
        are."""
        is_over = False
        try:
            while not is_over:
                is_over = self._ending.wait(_SEND_S)
                entries = [self._told.get_nowait() for _ in range(self._told.qsize())]
                if entries or is_over:
                    self._sending.queue_push(_QUEUE, msgpack.packb([self._rank, entries, is_over]))
        except StoreError as error:
            _log.warning("no more reports of rank %d for the trackers: %s", self._rank, str(error))

    def _collect(self) -> None:
        steps, has_left = Steps(self._world_size), set[int]()
        ends_s: float | None = None
        while len(has_left) < self._world_size and (ends_s is None or time.monotonic() < ends_s):
            if self._ending.is_set() and ends_s is None:
                # Others may be gone, or train on for longer than anybody waits.
                ends_s = time.monotonic() + HOLD_S
            wait_s = _SEND_S if steps.open or ends_s is not None else _IDLE_S
            try:
                rank, entries, is_over = msgpack.unpackb(self._receiving.queue_pop(_QUEUE, timeout=wait_s))
            except StoreTimeoutError:
                pass  # a step may have waited for long enough
            except StoreError:
                break  # closed, or the job's store is gone
            else:
                for step, time_s, numbers in entries:
                    steps.hear(rank, (step, time_s, numbers), time.monotonic())
                if is_over:
                    steps.leave(rank)
                    has_left.add(rank)
            self._give_out(steps)
        self._give_out(steps, all_of_them=True)
        if steps.num_late:
            _log.warning("reports of %d steps came too late for the trackers", steps.num_late)

    def _give_out(self, steps: Steps, *, all_of_them: bool = False) -> None:
        for step, time_s, numbers in steps.due(time.monotonic(), all_of_them=all_of_them):
            for outlet in self._outlets:
                outlet.put(numbers, step, time_s)


class _OfWorld:
    """The trackings of a world, which end before its store does."""

    def __init__(self) -> None:
        self.trackings: list[Tracking] = []

    def close(self) -> None:
        """End them."""
        for tracking in self.trackings:
            tracking.close()
