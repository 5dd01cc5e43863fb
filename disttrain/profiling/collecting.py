"""Brings the parts of all ranks to rank 0 through the store: ranks put theirs down and go on, a thread of rank 0 waits.

No rank waits for another but rank 0, at the end of the profile, and for a limited time: ranks that have raised, or are
gone, leave a profile of the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgpack

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.profiling.breakdown import RankTimes
from disttrain.store import Store

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 60.0
"""The time that rank 0 waits for others' parts of a cycle, from the first on, and at the end of the profile."""
_QUEUE: Final = "parts"
_CHUNK_BYTES: Final = 16 << 20
"""Of a value in the store, which takes four times as much."""
_IDLE_S: Final = 3600.0
_PART, _LEFT, _CLOSING = "part", "left", "closing"


@dataclass
class Cycle:
    """The parts of one cycle that have come: each rank's times and part of the trace; and who knows no common clock."""

    number: int
    due_s: float
    times: dict[int, RankTimes] = field(default_factory=dict)
    parts: dict[int, bytes] = field(default_factory=dict)
    unaligned: list[int] = field(default_factory=list)


def send_part(store: Store, cycle: int, times: RankTimes, part: bytes, *, is_aligned: bool) -> None:
    """Put down this rank's part of a cycle. Raises StoreError."""
    keys = [f"{cycle}/{times.rank}/{start}" for start in range(0, len(part), _CHUNK_BYTES)]
    for number, key in enumerate(keys):
        store.set(key, part[number * _CHUNK_BYTES :][:_CHUNK_BYTES])
    store.queue_push(_QUEUE, msgpack.packb([_PART, times.rank, cycle, asdict(times), keys, is_aligned]))


def say_left(store: Store, rank: int, reason: str) -> None:
    """Nothing more will come of this rank, for some `reason`, or because it has come to the end. Raises StoreError."""
    store.queue_push(_QUEUE, msgpack.packb([_LEFT, rank, reason]))


class Collector:
    """Calls `finish(cycle, absent)` on a thread for each cycle of which all `ranks` have sent their part, or have left;
    `absent` gives reasons by rank."""

    def __init__(self, store: Store, ranks: Sequence[int], finish: Callable[[Cycle, dict[int, str]], None]) -> None:
        self._store = store.listener()
        self._ranks = frozenset(ranks)
        self._finish = finish
        self._open: dict[int, Cycle] = {}
        self._left: dict[int, str] = {}
        self._ended: set[int] = set()
        self._closes_s: float | None = None
        self._thread = threading.Thread(target=self._collect, name="disttrain profile", daemon=True)
        self._thread.start()

    def close(self, patience_s: float) -> None:
        """Finish the cycles under way, with those ranks that have come by then."""
        try:
            self._store.queue_push(_QUEUE, msgpack.packb([_CLOSING, patience_s]))
            self._thread.join(patience_s + PATIENCE_S)
        except StoreError as error:
            _log.warning("the profile may lack ranks: %s", str(error))
        self._store.close()

    def _collect(self) -> None:
        while not self._is_over():
            dues_s = [cycle.due_s for cycle in self._open.values()]
            dues_s += [] if self._closes_s is None else [self._closes_s]
            wait_s = min(dues_s, default=time.monotonic() + _IDLE_S) - time.monotonic()
            try:
                self._hear(msgpack.unpackb(self._store.queue_pop(_QUEUE, timeout=max(wait_s, 0.001))))
            except StoreTimeoutError:
                pass  # something is due
            except StoreError:
                break  # what has come by now is good
            now_s = time.monotonic()
            for cycle in list(self._open.values()):
                if now_s >= cycle.due_s or self._ranks <= cycle.times.keys() | self._left.keys():
                    self._end(cycle)
        for cycle in list(self._open.values()):
            self._end(cycle)

    def _is_over(self) -> bool:
        is_closing = self._closes_s is not None
        return is_closing and (self._ranks <= self._left.keys() or time.monotonic() >= (self._closes_s or 0.0))

    def _hear(self, message: list[Any]) -> None:
        kind, *rest = message
        if kind == _CLOSING:
            self._closes_s = time.monotonic() + rest[0]
        elif kind == _LEFT:
            self._left[rest[0]] = rest[1]
        else:
            rank, number, times, keys, is_aligned = rest
            part = b"".join(self._store.multi_get(keys)) if keys else b""
            for key in keys:
                self._store.delete_key(key)
            if number in self._ended:
                _log.warning("the part of rank %d came too late for the profile", rank)
                return
            cycle = self._open.setdefault(number, Cycle(number, time.monotonic() + PATIENCE_S))
            cycle.times[rank], cycle.parts[rank] = RankTimes(**times), part
            if not is_aligned:
                cycle.unaligned.append(rank)

    def _end(self, cycle: Cycle) -> None:
        del self._open[cycle.number]
        self._ended.add(cycle.number)
        absent = {
            rank: self._left.get(rank, f"has sent nothing within {PATIENCE_S:g} s") or "has ended before"
            for rank in self._ranks - cycle.times.keys()
        }
        try:
            self._finish(cycle, absent)
        except Exception:  # noqa: BLE001 - a full disk, or somebody else's code, must not end the profile
            _log.exception("a profile could not be finished")
