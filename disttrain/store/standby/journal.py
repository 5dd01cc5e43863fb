"""Replicates a server to its standby, and holds replies until the standby knows of them. No I/O: actions in, actions
out.

The replies of a hub depend only on its requests and their order. So a standby that gets all requests that change
something, and the begin and end of sessions, has the same keys, values, queues and sessions. A new standby first gets
entries that make the present state from nothing, window by window, so that service goes on; then the changes since.
From then on every reply waits until the standby has acknowledged everything before it, so that both sides know
everything that any client was told, also the result of a read.

The standby's lease: as long as an acknowledgement is younger than `patience_s`, the leader does not go on without it.
So a standby whose last beat was answered within that time knows that the leader cannot have answered anybody alone.

The leader's own lease: a standby that is elected waits until it has heard nothing for a while (see `follower`). For
less than that, an acknowledged entry proves that the standby has not taken over. After that the leader, which may have
been frozen or cut off meanwhile, asks it before it answers anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum, unique
from typing import Any, Final

from disttrain.store.protocol.state import NEVER_S
from disttrain.store.protocol.wire import Address, Encoder, Message, WireError
from disttrain.store.standby.succession import Consent

Action = tuple[int, bytes, str]
"""(connection, bytes to write, why to hang up afterwards or "")."""

WINDOW_BYTES: Final = 4 << 20
"""Bytes of the present state that are sent before an acknowledgement is waited for."""

FRESH: Final = 0.5
"""Of the standby's patience: for so long after an entry was made that it has acknowledged, it follows."""

LATE_S: Final = 0.5
"""A timer that fires so late says that this process was busy or frozen, and may have acknowledgements unread."""


@unique
class Entry(IntEnum):
    """Kinds of entries for a standby; the comment shows what follows."""

    LIMITS = 0  # limits, term: those of the leader, first of all
    REQUEST = 1  # session, message: a client's request that may change something
    TIMED_OUT = 2  # session, request_id: of one that waited
    BEGIN = 3  # session: a client comes, or comes back
    CUT = 4  # session: its connection has ended
    END = 5  # session: it is forgotten
    SESSION = 6  # session, forgotten_id, replies, is_connected: one that there is already
    PARKED = 7  # session, request_id, op, name, argument, timeout_s: a request that waits already
    SYNCED = 8  # the present state is complete
    HEARD = 9  # beat: the last one that came
    TERM = 10  # term
    ELECTORS = 11  # sessions


class Journal:
    """The journal of one leader, for one standby."""

    def __init__(
        self,
        follower: int,
        standby: Address,
        patience_s: float,
        most_bytes: int,
        present: Iterator[Message],
        term: int,
        electors: Iterable[bytes],
        now_s: float,
    ) -> None:
        self.follower: int | None = follower
        self.standby = standby
        self.deadline_s = now_s + patience_s
        """Until when the leader waits for another acknowledgement."""
        self.reason = "it has acknowledged nothing in time"
        """Why to go on without it, at the deadline."""
        self.asks = False
        """The deadline is over, and electors are asked whether to go on alone."""
        self.is_deposed = False
        """They have not agreed in time: the standby may have taken over."""
        self.term = term
        """The last one that has begun, or is about to."""
        self.unheld: list[Action] = []
        """Actions that need not wait, since they tell nothing of the state."""
        self._electors = [*electors]
        self._consent: Consent | None = None
        self._has_resigned = False
        self._patience_s = patience_s
        self._most_bytes = most_bytes
        self._encode = Encoder().encode
        self._since: deque[bytes] = deque()
        self._num_since_bytes = 0
        self._coming = self._present_and_since(present)
        self._frames: list[bytes] = []
        self._num_sent = 0
        self._num_acknowledged = 0
        self._synced: int | None = None
        self._beat = 0
        self._fresh_s = now_s
        """Until when the standby is known to follow, if it has acknowledged all."""
        self._held: deque[tuple[int, Action]] = deque()
        self._send_window(now_s)

    @property
    def is_ready(self) -> bool:
        """True if the standby is known to have all that it needs to take over."""
        return self._synced is not None and self._num_acknowledged >= self._synced

    @property
    def is_overrun(self) -> bool:
        """More has changed than may gather, while the standby was told the present state."""
        return self._num_since_bytes > self._most_bytes

    def note(self, entry: Entry, *values: Any) -> None:
        """Adds an entry for what happens now."""
        try:
            frame = self._encode((int(entry), *values))
        except WireError:
            # A request that is nested so deep is none that changes anything.
            return
        if self._synced is None:
            self._since.append(frame)
            self._num_since_bytes += len(frame)
        else:
            self._frames.append(frame)
            self._num_sent += 1

    def acknowledge(self, num_entries: int, beat: int, now_s: float) -> None:
        """The standby has applied so many entries; `beat` is to be answered, unless it is 0."""
        self._num_acknowledged = max(self._num_acknowledged, num_entries)
        if not self._has_resigned:
            self.deadline_s, self.asks = now_s + self._patience_s, False
        if self._consent is not None:
            self._consent.acknowledged(num_entries)
        if beat and self._synced is not None:
            self._beat = beat
            self._ask(now_s)
        if self._synced is None and self._num_acknowledged >= self._num_sent:
            self._send_window(now_s)

    def without(self, connection: int) -> Journal | None:
        """`connection` is gone; None: with it the standby, which cannot have all that it would need to take over."""
        if connection == self.follower:
            self.follower = None
        return None if self.follower is None and self._synced is None else self

    def resign(self, reason: str, now_s: float) -> None:
        """The standby says that it does not take over: no need to wait until that is certain."""
        self.reason, self.deadline_s, self._has_resigned = reason, now_s, True

    def set_electors(self, electors: Iterable[bytes]) -> None:
        """Changes the electors."""
        self._electors = [*electors]
        if self._consent is not None:
            self.note(Entry.ELECTORS, self._electors)
            self._consent.changed(self._num_sent, self._electors)

    def elect(self, elector: bytes, for_leader: int, for_standby: int) -> list[int | bool]:
        """An elector says how it sides, and is told the term and whether we ask."""
        if self._consent is None:
            return [0, False]
        self._consent.side(elector, for_leader, for_standby)
        if self._consent.wants_renewal and not self.asks:
            self.term += 1
            self.note(Entry.TERM, self.term)
            self._consent.renewed(self._num_sent, self.term)
        return [self._consent.term, self.asks]

    @property
    def may_go_alone(self) -> bool:
        """True if the standby does not take over, now that the deadline is over."""
        return self._has_resigned or self._consent is None or self._consent.may_go_alone

    def bear(self, now_s: float, is_closing: bool) -> bool:
        """At `deadline_s`: whether to wait on, since it was us who were late, or since we must not go on alone."""
        if self._has_resigned:
            return False
        is_late = now_s - self.deadline_s > LATE_S
        self.is_deposed = self.asks and not is_late
        self.asks = not is_late and not is_closing
        self.deadline_s = NEVER_S if is_closing else now_s + self._patience_s
        return not (self.asks and self.may_go_alone)

    def actions(self, actions: list[Action], now_s: float) -> list[Action]:
        """The actions that may go out now: those whose acknowledgements have come, entries, and of `actions` what
        may."""
        if now_s > self._fresh_s and self.is_ready and any(data for _, data, _ in actions):
            self._ask(now_s)
        out, self.unheld = self.unheld, []
        while self._held and self._held[0][0] <= self._num_acknowledged:
            out.append(self._held.popleft()[1])
        if self._frames:
            if self.follower is not None:
                out.append((self.follower, b"".join(self._frames), ""))
            self._frames.clear()
        if self._synced is None or self._num_acknowledged >= self._num_sent:
            return out + actions
        self._held.extend((self._num_sent, action) for action in actions)
        return out

    def held(self) -> list[Action]:
        """The actions that wait; for a leader that goes on alone."""
        return [*self.unheld, *(action for _, action in self._held)]

    def _ask(self, now_s: float) -> None:
        """Tell the standby what needs no more than an acknowledgement."""
        self.note(Entry.HEARD, self._beat)
        self._fresh_s = now_s + FRESH * self._patience_s

    def _send_window(self, now_s: float) -> None:
        num_bytes = 0
        for frame in self._coming:
            self._frames.append(frame)
            self._num_sent += 1
            num_bytes += len(frame)
            if num_bytes >= WINDOW_BYTES:
                return
        self._synced = self._num_sent + 2
        self.note(Entry.ELECTORS, self._electors)
        self.note(Entry.SYNCED)
        self._fresh_s = now_s + FRESH * self._patience_s
        self._consent = Consent(self.term, self._electors)

    def _present_and_since(self, present: Iterator[Message]) -> Iterator[bytes]:
        yield from map(self._encode, present)
        while self._since:
            frame = self._since.popleft()
            self._num_since_bytes -= len(frame)
            yield frame
