"""Summarizes training steps while a job runs: the share of communication, by group, and the rank that others wait for.

`step` reads the ring's records since the last step. A thread does the rest: each rank sends its numbers to rank 0
through the store, so no rank waits for another, and no collective is added to those that are counted.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from disttrain.errors import SettingError, StoreError, StoreTimeoutError
from disttrain.flight_recorder.live.step_tally import Tally, Windows
from disttrain.flight_recorder.record.recorder import FlightRecorder
from disttrain.flight_recorder.record.ring.tail import RingTail
from disttrain.store import PrefixStore

_log = logging.getLogger(__name__)

SummaryHook = Callable[[dict[str, Any]], None]
"""Given a plain dict; see `StepSummaries`."""

_QUEUE: Final = "summaries"
_IDLE_S: Final = 3600.0
_CLOSING_S: Final = 2.0


class StepSummaries:
    """Call `step` at the end of each step, on every rank; rank 0 gives each hook a summary of every `every_steps`.

    A summary is a plain dict. Times are seconds per step, of the host: on CUDA, where the host does not wait for
    collectives, they are what issuing takes. Calls of groups of one rank, which send nothing, are not counted.

        step                 the last one, counted from 1;  num_steps  how many it sums up
        num_ranks            that have told; one that hangs or has died is missing
        step_s               mean over ranks
        waiting_share        of that time, in which a rank waited for communication and computed nothing; None on CUDA
        communication_share  of that time, in which at least one call was under way, computed beside or waited for
        communication_s      {mesh axis, or group without one: seconds, mean over ranks}
        lateness_s           {rank: by how much less it waited than the one that waited longest, over its groups}

    Hooks run on a thread of rank 0. What they raise is logged and costs one summary. The last steps of a job may be
    missing. Raises SettingError for `every_steps` below 1, FlightDumpError when `recorder` is not attached.
    """

    def __init__(self, recorder: FlightRecorder, *hooks: SummaryHook, every_steps: int = 10) -> None:
        if every_steps < 1:
            problem = f"every_steps={every_steps} must be at least 1."
            raise SettingError("StepSummaries", problem, "Sum up one step or more.")
        world = recorder.world
        self._hooks = hooks
        self._every_steps = every_steps
        self._rank = world.rank
        self._num_steps = 0
        self._tail = RingTail(recorder)
        self._tally = Tally(time.monotonic_ns())
        self._pid = os.getpid()
        self._told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._store = PrefixStore("flight", world.store)
        self._threads = [self._started(self._tell)]
        self._listening = self._store.listener() if world.rank == 0 else None
        if self._listening is not None:
            self._windows = Windows(world.world_size)
            self._threads.append(self._started(self._listen))
        recorder.when_closed(self.close)
        atexit.register(self.close)

    def step(self) -> None:
        """A step is over."""
        self._num_steps += 1
        for call in self._tail.ended():
            self._tally.take(call)
        if self._num_steps % self._every_steps == 0:
            now_ns = time.monotonic_ns()
            host_waits = not torch.cuda.is_initialized()
            message = self._tally.told(self._rank, self._num_steps, self._every_steps, now_ns, host_waits=host_waits)
            self._told.put(message)
            self._tally = Tally(now_ns)

    def close(self) -> None:
        """Sum up no more. Idempotent; the end of the world does it, too."""
        atexit.unregister(self.close)
        threads, self._threads = self._threads, []
        if not threads or os.getpid() != self._pid:
            return
        self._told.put(None)
        threads[0].join(_CLOSING_S)
        if self._listening is not None:
            self._listening.close()
            threads[1].join(_CLOSING_S)

    def _started(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name="disttrain flight summaries", daemon=True)
        thread.start()
        return thread

    def _tell(self) -> None:
        while (message := self._told.get()) is not None:
            try:
                self._store.queue_push(_QUEUE, message)
            except StoreError as error:
                _log.warning("no more summaries of steps from rank %d: %s", self._rank, str(error))
                return

    def _listen(self) -> None:
        assert self._listening is not None
        while True:
            try:
                message = self._listening.queue_pop(_QUEUE, timeout=_IDLE_S)
            except StoreTimeoutError:
                continue
            except StoreError:
                return  # Closed, or the job's store is gone.
            for summary in self._windows.hear(message):
                for hook in self._hooks:
                    try:
                        hook(summary)
                    except Exception:  # noqa: BLE001 - somebody else's code must not end the summaries
                        _log.exception("a hook for summaries of steps has failed")
