"""A standby's copy of a store's state, made by its leader's entries, from nothing on.

The leader's connections do not exist here: each session that is connected there counts as one connection. Time does not
pass; the leader tells which deadlines are over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.sessions import ASLEEP_S, Session, Sessions
from disttrain.store.protocol.state import NEVER_S, Outgoing, StoreState
from disttrain.store.protocol.wire import Message, Op
from disttrain.store.standby.journal import Entry

BATCH_BYTES: Final = 1 << 20
"""Of keys and values in one entry; a larger value has one of its own."""

_NOBODY: Final = b""


def present_state(
    state: StoreState, sessions: Sessions, name_of: Callable[[int], bytes], term: int
) -> Iterator[Message]:
    """Entries that make a replica the same as `state` and `sessions` are now, whatever becomes of these meanwhile.

    `name_of` gives the session of a connection.
    """
    entries: list[Message] = [[Entry.LIMITS, list(state.limits), term]]
    for session in sessions:
        forgotten_id, replies = session.memory()
        entries.append([Entry.SESSION, session.name, forgotten_id, replies, session.connection is not None])
    parked = [
        [Entry.PARKED, name_of(each.connection), each.request_id, each.op, each.name, each.argument, each.timeout_s]
        for each in state.parked_changes()
    ]
    values, queues = state.copies()
    return itertools.chain(entries, _values(values), _queues(queues), parked)


def _values(values: dict[str, bytes]) -> Iterator[Message]:
    keys: list[str] = []
    num_bytes = 0
    for key, value in values.items():
        if keys and num_bytes + len(key) + len(value) > BATCH_BYTES:
            yield _request(Op.MULTI_SET, keys, [values[each] for each in keys])
            keys, num_bytes = [], 0
        keys.append(key)
        num_bytes += len(key) + len(value)
    if keys:
        yield _request(Op.MULTI_SET, keys, [values[each] for each in keys])


def _queues(queues: dict[str, list[bytes]]) -> Iterator[Message]:
    for name, values in queues.items():
        for value in values:
            yield _request(Op.QUEUE_PUSH, name, value, 0, 1)


def _request(op: Op, *arguments: Any) -> Message:
    return [Entry.REQUEST, _NOBODY, [0, op, *arguments]]


class Replica:
    """A standby's copy of its leader's state."""

    def __init__(self) -> None:
        self.state = StoreState()
        self.sessions = Sessions()
        self.num_entries = 0
        self.is_synced = False
        """True if this is the leader's state, as it was at the last entry."""
        self.term = 0
        self.electors: list[bytes] = []
        self.beat = 0
        """The last one that the leader has heard."""
        self._connections = itertools.count(1)
        self._session_of: dict[int, Session] = {}
        self._apply: dict[int, Callable[..., None]] = {
            Entry.LIMITS: self._limits,
            Entry.REQUEST: self._request,
            Entry.TIMED_OUT: self._timed_out,
            Entry.BEGIN: self._begin,
            Entry.CUT: self._cut,
            Entry.END: self._end,
            Entry.SESSION: self._session,
            Entry.PARKED: self._parked,
            Entry.SYNCED: self._synced,
            Entry.HEARD: self._heard,
            Entry.TERM: self._begin_term,
            Entry.ELECTORS: self._elect,
        }

    def apply(self, entry: Message) -> None:
        """The leader tells this. Raises ValueError, TypeError or KeyError for what no leader says."""
        kind, *values = entry
        self._apply[kind](*values)
        self.num_entries += 1

    def take_over(self, now_s: float) -> tuple[StoreState, Sessions]:
        """State and sessions for a hub; all clients are cut off, and have from now on to come back."""
        for session in list(self.sessions):
            self._disconnect(session)
            self.sessions.cut_off(session, now_s, ASLEEP_S)
        return self.state, self.sessions

    def _limits(self, limits: list[int], term: int) -> None:
        self.state = StoreState(Limits(*limits))
        self.term = term

    def _begin_term(self, term: int) -> None:
        self.term = term

    def _elect(self, electors: list[bytes]) -> None:
        self.electors = electors

    def _request(self, name: bytes, message: Message) -> None:
        session = self.sessions.resume(name)
        if session is None or session.connection is None:
            self.state.handle(0, message, NEVER_S)
            return
        replies = self.state.handle(session.connection, message, NEVER_S)
        if message[1:2] == [Op.CANCEL]:
            session.waiting.discard(message[2])
        elif not replies:
            session.waiting.add(message[0])
        else:
            session.keep(replies[0][1])
            self._tell_woken(replies[1:])

    def _tell_woken(self, replies: list[Outgoing]) -> None:
        for connection, reply in replies:
            self._session_of[connection].woken(reply)

    def _timed_out(self, name: bytes, request_id: int) -> None:
        session = self.sessions.resume(name)
        if session is not None and session.connection is not None:
            self._tell_woken(self.state.time_out(session.connection, request_id))

    def _begin(self, name: bytes) -> None:
        connection = next(self._connections)
        session = self.sessions.resume(name) or self.sessions.begin(name, connection)
        session.connection = connection
        self._session_of[connection] = session

    def _cut(self, name: bytes) -> None:
        session = self.sessions.resume(name)
        if session is not None:
            self._disconnect(session)

    def _disconnect(self, session: Session) -> None:
        if session.connection is not None:
            self.state.disconnect(session.connection)
            del self._session_of[session.connection]
        session.cut()

    def _end(self, name: bytes) -> None:
        session = self.sessions.resume(name)
        if session is not None:
            self._disconnect(session)
            self.sessions.end(session)

    def _session(self, name: bytes, forgotten_id: int, replies: list[Message], is_connected: bool) -> None:
        self._begin(name)
        session = self.sessions.resume(name)
        assert session is not None
        session.remember(forgotten_id, replies)
        if not is_connected:
            self._disconnect(session)

    def _parked(self, name: bytes, request_id: int, op: int, key: str, argument: Any, timeout_s: float) -> None:
        session = self.sessions.resume(name)
        if session is not None and session.connection is not None:
            session.waiting.add(request_id)
            self.state.park(session.connection, request_id, Op(op), key, argument, timeout_s)

    def _synced(self) -> None:
        self.is_synced = True

    def _heard(self, beat: int) -> None:
        self.beat = beat
