"""The context manager that profiles some steps on all ranks: `disttrain.profile`."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch

from disttrain.errors import SettingError, StoreError
from disttrain.flight_recorder.live.step_tally import Ended
from disttrain.flight_recorder.record.recorder import FlightRecorder
from disttrain.flight_recorder.record.ring.tail import RingTail
from disttrain.process_group import World, current_world, is_initialized
from disttrain.process_group._torch import profiler
from disttrain.profiling.breakdown import Breakdown, times_of_rank
from disttrain.profiling.clocks import CommonClock
from disttrain.profiling.collecting import PATIENCE_S, Collector, Cycle, say_left, send_part
from disttrain.profiling.merged_trace import part_of_rank, write_merged
from disttrain.profiling.rank_trace import read_rank_trace
from disttrain.store import HashStore, PrefixStore, Store

_log = logging.getLogger(__name__)

MAX_RANKS: Final = 16
"""Of a larger world so many are profiled, evenly spread, where nobody says which."""
_PATIENCE_AFTER_ERROR_S: Final = 5.0
_only_one: Final = threading.Lock()
"""Held while a profile is entered: torch has one profiler for a process."""


class profile:  # noqa: N801  it is used as a function is
    """Profiles some steps on all ranks, as torch.profiler.profile does on one: leaves one trace, and a table on rank 0.

        with disttrain.profile("trace.json.gz", wait=1, warmup=1, active=3) as profiler:
            for batch in loader:
                train(batch)
                profiler.step()
        print(profiler.breakdown)  # on rank 0; None elsewhere

    `step`, called at the end of each step on every rank, counts: `wait` steps go by, torch's profiler gets ready for
    `warmup`, and records `active`; that `repeat` times (0: until the end), the traces of the second and further times
    being `trace.2.json.gz`, and so on. Without a call of `step`, and with no `wait` and `warmup`, all of the block is
    recorded.

    Each rank puts its part down in the store, and goes on. A thread of rank 0 writes the file, makes `breakdown`, and
    calls `on_ready` with it. Leaving the block, rank 0 waits for the others' parts, for a minute at most; not for
    ranks that have raised. Entering it is no collective, but all ranks do; a process that is no rank of a job may,
    too.

    Args: file  is written by rank 0, for Perfetto; compressed if it ends in .gz;  ranks  those that are profiled; by
          default all, of large worlds 16;  record_shapes, profile_memory, with_stack  as torch has them.
    Raises: SettingError for numbers that cannot be, and on entry where a profiler runs already.
    """

    def __init__(
        self,
        file: Path | str,
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        ranks: Sequence[int] | None = None,
        on_ready: Callable[[Breakdown], object] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        for name, number, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
            ("repeat", repeat, 0),
        ):
            if number < least:
                raise SettingError("profile", f"{name}={number} is less than {least}.", "Count steps from there.")
        self.file = Path(file)
        self.breakdown: Breakdown | None = None
        """Of the last cycle, on rank 0 once all ranks have sent their part."""
        self._wait, self._warmup, self._active, self._repeat = wait, warmup, active, repeat
        self._ranks = ranks
        self._on_ready = on_ready
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._num_steps = self._num_cycles = 0
        self._torch: torch.profiler.profile | None = None
        self._records = False
        self._range: torch.profiler.record_function | None = None
        self._first_step = 0
        self._tail: RingTail | None = None
        self._under_way: list[Ended] = []
        self._collector: Collector | None = None
        self._raised = ""

    def __enter__(self) -> Self:
        world = self._world = current_world("profile") if is_initialized() else None
        self._rank, size = (0, 1) if world is None else (world.rank, world.world_size)
        ranks = range(0, size, -(-size // MAX_RANKS)) if self._ranks is None else sorted(set(self._ranks))
        if not ranks or ranks[0] < 0 or ranks[-1] >= size:
            problem = f"ranks={list(ranks)} of a world with ranks 0 to {size - 1}."
            raise SettingError("profile", problem, "Name some of its ranks.", rank=self._rank)
        if profiler._is_profiler_enabled or not _only_one.acquire(blocking=False):
            raise SettingError(
                "profile",
                "a profiler runs in this process already, and torch has one.",
                "End that one first; repeat= profiles several times.",
                rank=self._rank,
            )
        try:
            self._is_profiled = self._rank in ranks
            store: Store = HashStore() if world is None else world.store
            self._store = PrefixStore(f"profile/{_number_of(world)}", store)
            self._clock = CommonClock(self._store, self._rank)
        except BaseException:
            _only_one.release()
            raise
        if self._rank == 0:
            self._collector = Collector(self._store, ranks, self._finish)
        try:
            self._move_on()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def step(self) -> None:
        """A step is over. Call it on every rank; where it is not profiled now, this takes under a microsecond."""
        self._num_steps += 1
        if self._is_profiled:
            self._end_range()
            self._move_on()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._raised = "" if error is None else f"{type(error).__name__}: {error}"[:1000]
            self._end(error)
            if self._is_profiled:
                say_left(self._store, self._rank, f"has raised {self._raised}" if error is not None else "")
            if self._collector is not None:
                self._collector.close(PATIENCE_S if error is None else _PATIENCE_AFTER_ERROR_S)
                self._tell_of_nothing()
        except StoreError as problem:
            _log.warning("rank %d has not sent its profile: %s", self._rank, str(problem))
        finally:
            self._clock.close()
            _only_one.release()

    def _end(self, error: BaseException | None) -> None:
        """Send what has been recorded of a cycle that is not complete."""
        try:
            self._end_range()
            self._end_cycle()
        except Exception as second:
            if error is None:
                raise
            # Of a device that has failed, perhaps: the first error is the one to look at.
            error.add_note(f"and then, while its profile ended: {type(second).__name__}: {second}")

    def _move_on(self) -> None:
        """Do what the next step needs."""
        if not self._is_profiled:
            return
        cycle, position = divmod(self._num_steps, self._wait + self._warmup + self._active)
        if position == 0:
            self._end_cycle()
        if self._repeat and cycle >= self._repeat:
            return
        if self._torch is None and position >= self._wait:
            self._torch = torch.profiler.profile(**self._options)
            self._torch.prepare_trace()
        if self._torch is not None and position >= self._wait + self._warmup:
            if not self._records:
                self._start()
            self._range = torch.profiler.record_function(f"ProfilerStep#{self._num_steps}")
            self._range.__enter__()

    def _start(self) -> None:
        assert self._torch is not None
        _finish_device()  # what was launched before is not of these steps
        self._records, self._first_step = True, self._num_steps
        recorder = None if self._world is None else self._world.recorder
        self._tail = RingTail(recorder) if isinstance(recorder, FlightRecorder) else None
        self._under_way = []
        self._torch.start_trace()

    def _end_range(self) -> None:
        if self._range is None:
            return
        if self._tail is not None:
            self._under_way += self._tail.ended()
        if self._num_steps % (self._wait + self._warmup + self._active) == 0:
            _finish_device()  # within the last step
        self._range.__exit__(None, None, None)
        self._range = None

    def _end_cycle(self) -> None:
        profiler, self._torch = self._torch, None
        if profiler is None:
            return
        if not self._records:
            # torch has been made ready, and ends only what has begun.
            profiler.start_trace()
            profiler.stop_trace()
            return
        self._records = False
        profiler.stop_trace()
        self._num_cycles += 1
        try:
            self._send(_exported(profiler))
        except (StoreError, OSError) as problem:
            # Training goes on.
            _log.warning("rank %d cannot send its profile: %s", self._rank, str(problem))

    def _send(self, trace: dict[str, Any]) -> None:
        """Put this rank's part of the trace into the store."""
        groups = () if self._world is None else self._world.groups
        steps = range(self._first_step, self._num_steps)
        axis_names = {group.group_name: group.axis_name for group in groups}
        alone = {group.axis_name or group.group_name for group in groups if group.group_size == 1}
        spans = read_rank_trace(trace, steps, axis_names, alone)
        times = times_of_rank(
            self._rank,
            len(steps),
            spans.window or (0, 0),
            spans.computing,
            spans.communication,
            spans.data_waits,
            on_device=spans.on_device,
            raised=self._raised,
        )
        start_ns, shift_ns = self._clock.start_ns, self._clock.shift_ns
        since_boot_ns = time.time_ns() - time.monotonic_ns()
        under_way = [
            call._replace(
                began_ns=call.began_ns + since_boot_ns,
                waits_ns=call.waits_ns + since_boot_ns,
                ended_ns=call.ended_ns + since_boot_ns,
            )
            for call in self._under_way
        ]
        label = f"{socket.gethostname()}:{os.getpid()}"
        part = part_of_rank(trace, self._rank, label, start_ns, shift_ns or 0, under_way, axis_names)
        send_part(self._store, self._num_cycles, times, part, is_aligned=shift_ns is not None)

    def _finish(self, cycle: Cycle, absent: dict[int, str]) -> None:
        """On rank 0's thread: all have sent what they will."""
        file: Path | None = self.file if cycle.number == 1 else _numbered(self.file, cycle.number)
        try:
            assert file is not None
            write_merged(file, [cycle.parts[rank] for rank in sorted(cycle.parts)])
        except OSError as problem:
            _log.warning("the trace %s cannot be written: %s", file, str(problem))
            file = None
        ranks = tuple(cycle.times[rank] for rank in sorted(cycle.times))
        self.breakdown = Breakdown(ranks, file, absent, tuple(sorted(cycle.unaligned)))
        if self._on_ready is not None:
            self._on_ready(self.breakdown)

    def _tell_of_nothing(self) -> None:
        if self.breakdown is None:
            first = self._wait + self._warmup
            reason = f"step() was called {self._num_steps} times, and the first {first} steps are not recorded"
            self.breakdown = Breakdown((), None, {self._rank: reason} if self._is_profiled else {})


def _finish_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _exported(profiler: torch.profiler.profile) -> dict[str, Any]:
    """The events that the profiler has recorded, in Chrome's format."""
    with tempfile.TemporaryDirectory(prefix="disttrain-profile-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_bytes())
    return trace


def _numbered(file: Path, number: int) -> Path:
    """trace.2.json.gz of trace.json.gz."""
    stem, dot, endings = file.name.partition(".")
    return file.with_name(f"{stem}.{number}{dot}{endings}")


class _Count:
    """The profiles of a world, so that each has keys of its own in the store: all ranks make them in one order."""

    def __init__(self) -> None:
        self.number = 0

    def close(self) -> None:
        """Nothing is held."""


def _number_of(world: World | None) -> int:
    if world is None:
        return 0
    count = world.companion(_Count, _Count)
    count.number += 1
    return count.number
