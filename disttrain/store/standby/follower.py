"""A standby's side: it follows its leader over a link like any client's, in a thread, until the leader is gone.

It may take over if the leader is proven dead (its machine says that nobody listens at its address any more) while its
lease lasts (see `journal`), since the leader cannot have gone on alone then. A leader that is merely silent may be
alive behind a network failure, and go on alone. Then most electors must have lost it too (see `succession`); otherwise
the standby starts again as soon as it can.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from disttrain.errors import StoreConnectionError, StoreError
from disttrain.store.connection.dial import Dialer, Link
from disttrain.store.protocol.handshake import SessionGoneError, Votes
from disttrain.store.protocol.wire import NEWS, NOT_A_REQUEST, Address, Op, WireError, encode
from disttrain.store.standby.replica import Replica
from disttrain.store.standby.succession import may_take_over

if TYPE_CHECKING:
    from disttrain.store.tls.socket import ClientTls

PATIENCE_S: Final = 4.0
"""The time for which a leader waits for a standby that says nothing."""

_BEATS: Final = 8
"""In that time."""

_SILENT: Final = 0.625
"""Of that time: a leader that has said nothing for so long is lost."""

_LEASE: Final = 0.8
"""Of that time: clocks need not run alike."""

_VOTES: Final = 2
"""So many times as long a vote counts."""

_ATTEMPT_S: Final = 1.0
"""The time for one attempt to reach a silent leader."""

_LOOK_S: Final = 60.0
"""The time for which a leader is looked for that does not answer."""

_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.5
_READ_BYTES: Final = 1 << 20
_FRAME_BYTES: Final = (1 << 32) - 1
"""The leader has proved who it is, and its state's parts may be larger than its clients' requests."""


class Following(NamedTuple):
    """Whom a standby follows, under which host clients will find it itself, and how long the leader bears with it."""

    host: str
    port: int
    known_as: str
    patience_s: float = PATIENCE_S


class Follower:
    """Follows the leader until it is gone; `port` is the standby's own, `votes` what its hub hears from electors."""

    def __init__(self, following: Following, port: int, token: str | None, tls: ClientTls | None, votes: Votes) -> None:
        self._leader: Address = (following.host, following.port)
        self._own: Address = (following.known_as, port)
        self._patience_s = following.patience_s
        self._token = token
        self._tls = tls
        self._votes = votes
        self._dialer = self._new_dialer()
        self._is_over = threading.Event()
        self._link: Link | None = None
        self._lease_s = float("-inf")
        """Until when the leader cannot have gone on alone."""
        self._heard_s = float("-inf")
        """The time of its last message: it may answer alone for a while (see `journal`)."""

    def run(self) -> Replica | None:
        """Follows until the leader dies. Returns all that the leader knew; None: `close` was called.

        Raises StoreError when the leader cannot be reached, refuses us, or is dead and may have gone on alone before.
        """
        replica = Replica()
        pause_s = _PAUSE_S
        while not self._is_over.is_set():
            link = self._reached(replica)
            if link is None:
                return replica
            replica = Replica()
            self._lease_s = float("-inf")
            self._link = link
            try:
                self._listen(link, replica)
            except OSError:
                pass  # What became of the leader is found out next.
            finally:
                link.socket.close()
            # One that has refused us would do so again.
            pause_s = _PAUSE_S if replica.is_synced else min(2 * pause_s, _LONGEST_PAUSE_S)
            if not replica.is_synced:
                self._is_over.wait(pause_s)
        return None

    def close(self) -> None:
        """Let `run` return, after it has told the leader. From any thread."""
        self._is_over.set()
        if self._link is not None:
            try:
                self._link.socket.shutdown(socket.SHUT_RD)
            except OSError:
                return  # It has broken already.

    def _reached(self, replica: Replica) -> Link | None:
        """The next link to the leader; None when it is dead, and `replica` has all that anybody was told."""
        began_s = time.monotonic()
        until_s = began_s + _LOOK_S
        pause_s = _PAUSE_S
        while True:
            try:
                return self._dialer.attempt(until_s, _ATTEMPT_S)
            except SessionGoneError as error:
                # While the lease lasts, the leader would know us: it is another's store.
                if replica.is_synced and time.monotonic() < self._lease_s:
                    return None
                self._dialer = self._new_dialer()
                reason = error.problem
            except ConnectionRefusedError:
                if replica.is_synced and time.monotonic() < self._lease_s:
                    return None
                # Electors find that out as well, and may speak for us.
                until_s = min(until_s, began_s + (_VOTES * self._patience_s if replica.is_synced else 0.0))
                reason = "it is dead, and may have gone on without us before"
            except (OSError, WireError) as error:
                reason = str(error).rstrip(".")
            if replica.is_synced and self._is_elected(replica):
                return None
            if time.monotonic() + pause_s >= until_s:
                raise self._lost(reason)
            if self._is_over.wait(pause_s):
                raise self._lost("we were closed")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _new_dialer(self) -> Dialer:
        return Dialer(*self._leader, self._token, self._tls)

    def _is_elected(self, replica: Replica) -> bool:
        now_s = time.monotonic()
        if now_s - self._heard_s <= _SILENT * self._patience_s:
            return False
        since_s = now_s - _VOTES * self._patience_s
        votes = {elector: term for elector, (term, said_s) in self._votes.copy().items() if said_s > since_s}
        return may_take_over(replica.term, replica.electors, votes)

    def _listen(self, link: Link, replica: Replica) -> None:
        """Apply what the leader says until it says no more."""
        beat_s = self._patience_s / _BEATS
        link.decoder.max_frame_bytes = _FRAME_BYTES
        link.socket.settimeout(beat_s)
        link.socket.sendall(encode([0, int(Op.FOLLOW), *self._own, self._patience_s]))
        heard_s = beat_sent_s = time.monotonic()
        num_beats = 0
        unheard: dict[int, float] = {}
        while True:
            try:
                data = link.socket.recv(_READ_BYTES)
            except (BlockingIOError, TimeoutError):
                data = None
            now_s = time.monotonic()
            if self._is_over.is_set():
                link.socket.sendall(encode([0, int(Op.LEAVE)]))
                return
            if data == b"" or now_s - heard_s > _SILENT * self._patience_s:
                return
            if data:
                self._heard_s = heard_s = now_s
                self._apply(link, replica, data)
                if replica.beat in unheard:
                    self._lease_s = unheard[replica.beat] + _LEASE * self._patience_s
                    unheard = {beat: sent_s for beat, sent_s in unheard.items() if beat > replica.beat}
            is_due = now_s - beat_sent_s >= beat_s or (replica.is_synced and not num_beats)
            if is_due:
                beat_sent_s = now_s
                num_beats += replica.is_synced
                if num_beats:
                    unheard[num_beats] = now_s
            if data or is_due:
                beat = num_beats if is_due else 0
                link.socket.sendall(encode([0, int(Op.ACK), replica.num_entries, beat]))

    def _apply(self, link: Link, replica: Replica, data: bytes) -> None:
        try:
            for entry in link.decoder.feed(data):
                if entry[0] == NOT_A_REQUEST:
                    raise ConnectionResetError(f"the leader does without us: {entry[2]}")
                if entry[0] != NEWS:
                    replica.apply(entry)
        except (ValueError, TypeError, KeyError, IndexError, WireError) as error:
            raise self._lost(f"what it says makes no sense ({error!r})") from None

    def _lost(self, reason: str) -> StoreError:
        return StoreConnectionError("standby", f"{reason}.", where=f"{self._leader[0]}:{self._leader[1]}")
