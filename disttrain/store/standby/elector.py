"""An elector's thread, one for each node of a job: it stays connected to the store, and votes when that is lost.

It notices a loss sooner than other clients, which may wait for a reply until their timeout. When it finds that the
standby has taken over, it moves its process' store there.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from disttrain.errors import StoreError
from disttrain.store.client import TCPStore
from disttrain.store.connection.dial import Dialer, Link
from disttrain.store.protocol.handshake import SessionGoneError, to_address
from disttrain.store.protocol.wire import NEWS, Op, WireError, encode
from disttrain.store.standby.succession import Side

BEAT_S: Final = 0.5
SILENT_S: Final = 2.0
"""A store that has not answered for so long is lost."""

_ATTEMPT_S: Final = 1.0
_READ_BYTES: Final = 1 << 12


class Elector:
    """Votes for the process that `store` belongs to; it may be closed later than this."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._side = Side()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elector", daemon=True)

    def start(self) -> None:
        """Return at once."""
        self._thread.start()

    def close(self) -> None:
        """Have no say any more. Idempotent."""
        self._is_over.set()
        self._thread.join(SILENT_S + 2 * _ATTEMPT_S)

    def _run(self) -> None:
        dialer = self._store.new_dialer()
        while not self._is_over.wait(BEAT_S):
            dialer.vote = self._side.for_standby
            try:
                link = dialer.attempt(time.monotonic() + 2 * _ATTEMPT_S, _ATTEMPT_S)
                self._store.move(dialer.address)
            except SessionGoneError:
                # It is another's by now; who was away so long has no say any more.
                dialer = self._store.new_dialer()
                self._side = Side()
                continue
            except (OSError, WireError):
                self._side.lost()
                continue
            except StoreError:
                return  # This process is not let in; all that it asks the store for says so.
            try:
                while not self._is_over.is_set():
                    self._side.heard(*self._ask(link, dialer))
                    self._is_over.wait(BEAT_S)
                link.socket.sendall(encode([0, int(Op.LEAVE)]))
            except (OSError, WireError):
                self._side.lost()
            finally:
                link.socket.close()

    def _ask(self, link: Link, dialer: Dialer) -> tuple[int, bool]:
        """The store's term, and whether it asks to go on alone. Raises OSError or WireError when it does not answer."""
        link.socket.settimeout(SILENT_S)
        link.socket.sendall(encode([0, int(Op.ELECT), self._side.for_leader, self._side.for_standby]))
        until_s = time.monotonic() + SILENT_S
        while time.monotonic() < until_s:
            try:
                data = link.socket.recv(_READ_BYTES)
            except BlockingIOError:
                continue  # Not a whole record of TLS yet.
            if not data:
                raise ConnectionResetError("the store hung up")
            answer = None
            for message in link.decoder.feed(data):
                match message:
                    case [int(number), _, standby] if number == NEWS:  # may come right behind the answer
                        dialer.standby = to_address(standby)
                    case [0, 0, [int(term), bool(asks)]]:
                        answer = term, asks
                    case _:
                        raise WireError("elect", f"the store says {message!r}.")
            if answer is not None:
                return answer
        raise TimeoutError("the store does not answer")
