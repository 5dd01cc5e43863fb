"""Agrees with the other ranks on the step after which all of them stop, once one of them has been told to.

Ranks are not all at the same step when a notice comes: hosts run ahead of their devices, and of each other. So each
rank's witness, a thread, says how many steps its rank has behind it, and from then on the rank waits at the end of its
next step. The last that says so computes the step that no rank has passed yet; there all are told to stop. Until a
notice comes nothing is sent, and nobody waits: a question costs the time of a lock.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.process_group.watching.departures import members_left
from disttrain.process_group.watching.stop_signals import STOP_SIGNALS

if TYPE_CHECKING:
    from disttrain.process_group.interfaces import GroupLike, WorldLike

_log = logging.getLogger(__name__)

AGREE_S: Final = 30.0
"""The time that all ranks' witnesses may take to say how far their ranks are."""
_LOOK_S: Final = 1.0
_ASKED: Final = json.dumps({"stop": None}).encode()
"""A notice to all ranks: one of them asks whether to stop, and so will all."""
_NEVER: Final = math.inf
"""Where a rank has left already, since the job is at its end."""
_UNKNOWN: Final = math.nan
"""Where ranks don't answer."""


class Stopping:
    """The notices to a world's ranks, and what these make of them.

    Args: group  of all ranks;  is_alone  no other rank is there to be asked.
    """

    def __init__(self, world: WorldLike, group: GroupLike, *, is_alone: bool) -> None:
        self._world = world
        self._group = group
        self._is_alone = is_alone
        self._lock = threading.Lock()
        self._num_passed = 0
        self._is_noticed = False
        self._is_closed = False
        self._is_listening = False
        """Signals are notices to this rank, and its next question need not see to it."""
        self._stops_after: float | None = None
        """The number of the question that is answered by yes, from 1; None: not known yet."""

    def prepare(self) -> None:
        """Be there for the others' questions, whatever the transports are."""
        if not self._is_alone:
            self._world.become_witness()

    def listen(self) -> None:
        """Take signals for notices from now on, on all ranks: those that have not asked yet would die of them."""
        if self._is_listening:
            return
        self._is_listening = True
        self.prepare()
        STOP_SIGNALS.listen(self)
        if self._world.witness is not None:
            self._world.witness.tell(_ASKED, "asked to stop")

    def is_requested(self) -> bool:
        """The answer to this rank's next question, which is that of all ranks to theirs of this number."""
        with self._lock:
            if not self._is_noticed:
                self._num_passed += 1
                return False
        if self._stops_after is None:
            self._stops_after = self._agreed()
        self._num_passed += 1
        return self._num_passed >= self._stops_after

    def request(self, reason: str) -> bool:
        """Tell all ranks; from any thread, and of any number of ranks. False: they could not agree."""
        if self._is_closed:
            return False
        if self._is_alone:
            self.hear({"stop": reason})
            return True
        self.prepare()
        witness = self._world.witness
        notice = json.dumps({"stop": reason}).encode()
        return witness is not None and witness.tell(notice, "stop") and not math.isnan(self._agreed())

    def close(self) -> None:
        """The world ends: nobody asks any more."""
        self._is_closed = True

    def hear(self, said: dict[str, Any]) -> None:
        """A rank was told to stop, or asks whether one was; in the witness's thread, perhaps several times."""
        if said["stop"] is None:
            # In a thread: where a signal has come before, that one waits for what this one is to hear.
            threading.Thread(
                target=STOP_SIGNALS.listen, args=(self,), name="disttrain stop signals", daemon=True
            ).start()
            return
        with self._lock:
            if self._is_noticed:
                return
            self._is_noticed = True
            num_passed = self._num_passed
            if self._is_alone:
                self._stops_after = num_passed + 1
        _log.info("told to stop: %s", said["stop"])
        if self._is_alone:
            return
        with suppress(StoreError):  # Without it the job is over.
            store, size = self._world.store, self._group.group_size
            store.set(f"stop/{self._world.rank}", str(num_passed))
            if store.add("stop/num_told", 1) == size:
                answers = store.multi_get([f"stop/{rank}" for rank in range(size)])
                store.compare_set("stop/after", b"", str(max(map(int, answers)) + 1))

    def _agreed(self) -> float:
        """The number of the question that is answered by yes, _NEVER or _UNKNOWN, as for all ranks."""
        store = self._world.store
        until_s = time.monotonic() + AGREE_S
        with suppress(StoreError):
            while True:
                try:
                    store.wait(["stop/after"], _LOOK_S)
                    return float(store.get("stop/after"))
                except StoreTimeoutError:
                    if members_left(self._group):
                        return float(store.compare_set("stop/after", b"", str(_NEVER)))
                    if time.monotonic() > until_s:
                        _log.warning("told to stop, but some ranks did not say within %g s how far they are.", AGREE_S)
                        return float(store.compare_set("stop/after", b"", str(_UNKNOWN)))
        return _NEVER
