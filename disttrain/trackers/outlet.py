"""The way of numbers to one tracker: a queue with a bound, and a thread, so that no tracker stops or slows training."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from disttrain.trackers.tracker import Numbers, Tracker

_log = logging.getLogger(__name__)

MAX_WAITING: Final = 10_000
"""Steps that may wait for a slow tracker."""

OPENING_S: Final = 60.0
"""The time that a tracker may take to begin where the job ends before: its library alone loads for seconds, on busy or
remote disks for tens of them, and a short run would lose all that it had to say."""

_Entry = tuple[Numbers, int, float]


class Outlet:
    """Gives numbers to `tracker`, on a thread. The first that are lost are told at once, with the reason; how many
    were, at the end.

    Args: run_id  of the run to go on with;  opened  is told the run's id, on the thread.
    """

    def __init__(
        self,
        tracker: Tracker,
        run_id: str | None,
        first_step: int,
        config: Mapping[str, Any],
        opened: Callable[[str, str], object],
        *,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.tracker = tracker
        self._begin = (run_id, first_step, config)
        self._opened = opened
        self._waiting: queue.Queue[_Entry | None] = queue.Queue(max_waiting)
        self._num_given = self._num_lost = 0
        self._has_told = False
        self._has_opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"disttrain {tracker.name}", daemon=True)
        self._thread.start()

    def put(self, numbers: Numbers, step: int, time_s: float) -> None:
        """Never waits, and never raises."""
        self._num_given += 1
        try:
            self._waiting.put_nowait((numbers, step, time_s))
        except queue.Full:
            self._lost(1, f"it is slow, and {self._waiting.maxsize} steps wait for it")

    def close(self, patience_s: float) -> None:
        """Let it have what waits, for so long at most once it has begun."""
        self._has_opened.wait(OPENING_S)
        has_end = True
        try:
            self._waiting.put(None, timeout=patience_s)
            self._thread.join(patience_s)
        except queue.Full:
            has_end = False
        if self._thread.is_alive():
            # The end itself waits, and the step that the tracker is at may still come.
            self._lost(self._waiting.qsize() - has_end, f"it did not end within {patience_s:g} s")
        if self._num_lost:
            _log.warning("%s has lost %d of %d steps", self.tracker.name, self._num_lost, self._num_given)

    def _run(self) -> None:
        if not self._opens():
            # Its queue stays as it is, for nobody to wait for; what comes is counted as it goes.
            while self._waiting.get() is not None:
                self._num_lost += 1
            return
        while (entry := self._waiting.get()) is not None:
            self._try(lambda entry=entry: self.tracker.log(*entry), 1)  # type: ignore[misc]
            if self._waiting.empty():
                self._try(self.tracker.flush, 0)
        self._try(self.tracker.close, 0)

    def _opens(self) -> bool:
        run_id, first_step, config = self._begin
        try:
            self._opened(self.tracker.name, self.tracker.open(run_id, first_step, config))
        except Exception as error:  # noqa: BLE001 - a tracker is no reason for training to end
            self._lost(0, f"it does not begin: {type(error).__name__}: {error}")
            return False
        finally:
            self._has_opened.set()
        return True

    def _try(self, act: Callable[[], object], num_steps: int) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - as above
            self._lost(num_steps, f"{type(error).__name__}: {error}")

    def _lost(self, num_steps: int, reason: str) -> None:
        self._num_lost += num_steps
        if not self._has_told:
            self._has_told = True
            _log.warning("%s loses numbers, and training goes on without: %s", self.tracker.name, reason)
