"""A server's duties as leader: it replicates to its standby, holds replies, and asks electors when the standby is gone.

It is between the hub, which reports connections and requests, and the journal of the present standby.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from disttrain.store.protocol.handshake import to_address
from disttrain.store.protocol.wire import NEWS, NOT_A_REQUEST, Address, Message, Op, Status, encode
from disttrain.store.standby.journal import Action, Entry, Journal

NOBODY: Final = 0
"""As the connection of an action: its text is for the log alone."""

ABSENT_S: Final = 10.0
"""After which an elector that is cut off does not count any more."""


MOST_PATIENCE_S: Final = 60.0
"""The longest time that a standby may ask for, while nobody is answered."""


class Lead:
    """A server's, whether or not it has a standby.

    Args: clients  gives the connections that have proved themselves;  present  the entries that make the present state,
          in the term given;  most_bytes  see `Journal`.
    """

    def __init__(
        self, clients: Callable[[], Iterable[int]], present: Callable[[int], Iterator[Message]], most_bytes: int
    ) -> None:
        self.journal: Journal | None = None
        """While there is a standby, or was one only just now."""
        self.is_deposed = False
        """The standby may have taken over: nothing is to be answered any more."""
        self._clients = clients
        self._present = present
        self._most_bytes = most_bytes
        self._term = 0
        """See `succession`."""
        self._electors: dict[bytes, None] = {}
        self._absent: dict[bytes, float] = {}
        """Electors that are cut off, and until when they count."""
        self._is_announced = False
        """Clients have been told of the standby."""
        self._is_closing = False

    @property
    def standby(self) -> Address | None:
        """The address for clients if this server is gone."""
        return self.journal.standby if self.journal is not None and self._is_announced else None

    @property
    def deadline_s(self) -> float | None:
        """The next time to call `tick`."""
        deadlines = [*list(self._absent.values())[:1], *([] if self.journal is None else [self.journal.deadline_s])]
        return min(deadlines, default=None)

    def inherit(self, term: int, electors: Iterable[bytes], now_s: float) -> None:
        """Takes over the sessions that this server, a standby before, knows from its leader; all are cut off."""
        self._term = term
        self._electors = dict.fromkeys(electors)
        self._absent = dict.fromkeys(electors, now_s + ABSENT_S)

    def close(self) -> None:
        """Nobody can connect any more: go on with the standby, which may take that for death, or not at all."""
        self._is_closing = True

    # What happens to clients.

    def came(self, session: bytes, welcome: Action) -> list[Action]:
        """A client, or one that was cut off, is to be let in; what may be sent of its welcome."""
        self._absent.pop(session, None)
        if self.journal is None:
            return [welcome]
        self.journal.note(Entry.BEGIN, session)
        if session not in self._electors:
            return [welcome]
        # It is needed to decide what all others wait for, and knows its session's name already.
        self.journal.unheld.append(welcome)
        return []

    def cut(self, connection: int, session: bytes, now_s: float) -> None:
        """A client's connection has ended."""
        if session in self._electors:
            self._absent[session] = now_s + ABSENT_S
        if self.journal is not None:
            self.journal.note(Entry.CUT, session)
            self.journal = self.journal.without(connection)

    def ended(self, session: bytes) -> None:
        """A client's session has ended."""
        if self.journal is not None:
            self.journal.note(Entry.END, session)
        if session in self._electors:
            self._dismiss(session)

    def left(self, connection: int, now_s: float) -> None:
        """A client says that it leaves; it may be the standby."""
        if self.journal is not None and connection == self.journal.follower:
            self.journal.resign("it has left", now_s)

    # What the standby and electors ask.

    def follow(self, connection: int, message: Message, now_s: float) -> bytes:
        """A standby wants to be told everything; b"" where it is, else last words that no entry looks like."""
        standby, patience_s = to_address(message[2:4]), message[-1]
        is_time = type(patience_s) in (int, float) and 0 < patience_s <= MOST_PATIENCE_S
        if len(message) != 5 or standby is None or not is_time:
            text = f"follow takes a host, a port and at most {MOST_PATIENCE_S:g} seconds."
            return encode([NOT_A_REQUEST, int(Status.REFUSED), text])
        if self.journal is not None:
            if self.journal.standby == standby:
                self.journal.resign("it begins anew", now_s)
            return encode([NOT_A_REQUEST, int(Status.REFUSED), "there is a standby, or was one only just now."])
        self._term += 1
        self._is_announced = False
        self.journal = Journal(
            connection,
            standby,
            patience_s,
            self._most_bytes,
            self._present(self._term),
            self._term,
            self._electors,
            now_s,
        )
        return b""

    def acknowledge(self, connection: int, message: Message, now_s: float) -> bytes:
        """The standby knows so much."""
        journal = self.journal
        match message:
            case [int(), int(), int(num_entries), int(beat)] if journal is not None and connection == journal.follower:
                journal.acknowledge(num_entries, beat, now_s)
        return b""

    def elect(self, connection: int, session: bytes, message: Message) -> bytes:
        """An elector says how it sides. It is answered at once, whatever waits."""
        match message:
            case [int(), int(op), int(for_leader), int(for_standby)] if op == Op.ELECT:
                if session not in self._electors:
                    self._electors[session] = None
                    self._tell_electors()
                if self.journal is None:
                    return encode([message[0], int(Status.OK), [self._term, False]])
                outcome = self.journal.elect(session, for_leader, for_standby)
                self._term = self.journal.term
                self.journal.unheld.append((connection, encode([message[0], int(Status.OK), outcome]), ""))
                return b""
        return encode([message[0], int(Status.REFUSED), "elect takes two terms."])

    # What goes out.

    def after(self, actions: list[Action], now_s: float) -> list[Action]:
        """The actions that may go out, of these and of earlier ones, with the messages to the standby."""
        journal = self.journal
        if journal is None:
            return actions
        if journal.is_overrun:
            return actions + self._go_alone("it is too slow to catch up")
        actions = journal.actions(actions, now_s)
        if journal.asks and journal.may_go_alone:
            return actions + self._go_alone(journal.reason)
        if journal.is_ready and not self._is_announced:
            self._is_announced = True
            actions += self._news(journal.standby, journal.follower)
            actions.append((NOBODY, b"", f"has a standby at {journal.standby[0]}:{journal.standby[1]}"))
        return actions

    def tick(self, actions: list[Action], now_s: float) -> list[Action]:
        """Time has passed; as `after`."""
        while self._absent and (first := next(iter(self._absent.items())))[1] <= now_s:
            self._dismiss(first[0])
        actions = self.after(actions, now_s)
        journal = self.journal
        if journal is not None and journal.deadline_s <= now_s:
            if not journal.bear(now_s, self._is_closing):
                actions += self._go_alone(journal.reason)
            self.is_deposed = journal.is_deposed
        return actions

    def _dismiss(self, elector: bytes) -> None:
        self._absent.pop(elector, None)
        del self._electors[elector]
        self._tell_electors()

    def _tell_electors(self) -> None:
        if self.journal is not None:
            self.journal.set_electors(self._electors)

    def _go_alone(self, reason: str) -> list[Action]:
        """Do without the standby from now on."""
        assert self.journal is not None
        journal, self.journal = self.journal, None
        # No side that an elector takes from now on is of use to that standby.
        self._term = journal.term + 1
        actions = [*journal.held(), (NOBODY, b"", f"goes on without its standby: {reason}")]
        if journal.follower is not None:
            actions.append((journal.follower, encode([NOT_A_REQUEST, int(Status.REFUSED), reason]), reason))
        return actions + self._news(None, journal.follower) if self._is_announced else actions

    def _news(self, standby: Address | None, follower: int | None) -> list[Action]:
        """Tell all clients where the standby is."""
        news = encode([NEWS, int(Status.OK), standby])
        return [(connection, news, "") for connection in self._clients() if connection != follower]
