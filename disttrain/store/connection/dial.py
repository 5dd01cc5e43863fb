"""Connect to a store's server and shake hands; try again until the timeout, for the server may start after us."""

from __future__ import annotations

import errno
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from disttrain.errors import SettingError, StoreAuthError, StoreConnectionError, StoreError, StoreLimitError
from disttrain.store.connection.addresses import LOOPBACK_REMEDY, is_loopback_down, is_unix, lookup_name, unix_path
from disttrain.store.connection.keepalive import set_options
from disttrain.store.protocol.handshake import ClientHandshake, SessionGoneError, to_address
from disttrain.store.protocol.wire import HANDSHAKE_FRAME_BYTES, NEWS, Address, Decoder, Message, WireError, encode

if TYPE_CHECKING:
    from disttrain.store.tls.socket import ClientTls, TlsSocket

ATTEMPT_S: Final = 15.0
"""Longest time that one attempt may take before the next begins."""

_DIVIDED_S: Final = 3.0
"""The same for the first attempts where there is another address to try."""

_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 1.0
_CALM_S: Final = 5.0


class Link(NamedTuple):
    """A connected, authenticated, blocking socket, and what comes with it."""

    socket: socket.socket | TlsSocket
    decoder: Decoder
    frame_bytes: int


_GONE_S: Final = 2.0
"""The time for which nobody must have listened before a server that has been there is taken for gone."""


class Dialer:
    """Makes the links of one client, one after the other, to the server at `host`:`port` or to who takes its place.

    `tls`: how to put them into TLS; None: they go without. `standby`: where to look if the server is gone; the server
    itself may name another.
    """

    def __init__(
        self, host: str, port: int, token: str | None, tls: ClientTls | None = None, standby: Address | None = None
    ) -> None:
        self.address: Address = (host, port)
        self.standby = standby
        self.was_there = False
        """True once the server is known to have been there: then a client that finds nobody listening need not wait for
        it."""
        self.vote = 0
        """For a standby, see `handshake`."""
        self._token = token
        self._tls = tls
        self._session = b""
        # Set: nobody wants a link any more.
        self._is_over = threading.Event()
        self._num_vain = 0
        self._redialed_s = float("-inf")

    @property
    def where(self) -> str:
        """The address of the server, for messages."""
        return f"{self.address[0]}:{self.address[1]}"

    def dial(self, timeout_s: float) -> Link:
        """The first link.

        Raises StoreConnectionError when the timeout is over, or at once where the loopback interface is down; at once
        StoreAuthError when tokens or certificates don't match, StoreLimitError when the server has too many clients,
        and SettingError for what cannot be a host name.
        """
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self.attempt(deadline_s)
            except (StoreAuthError, StoreLimitError):
                raise
            except UnicodeError:
                # The codec of international host names refuses empty labels and long ones.
                problem, remedy = f"{self.address[0]!r} is not a host name.", "Check it, or give an address."
                raise SettingError("connect", problem, remedy, where=self.where) from None
            except (OSError, WireError) as error:
                now_s = time.monotonic()
                if self.was_there and isinstance(error, ConnectionRefusedError) and now_s > began_s + _GONE_S:
                    raise StoreConnectionError("connect", "nobody listens there any more.", where=self.where) from None
                if (
                    isinstance(error, OSError)
                    and error.errno == errno.ENETUNREACH
                    and is_loopback_down(self.address[0])
                ):
                    problem = "this machine's loopback interface is down."
                    raise StoreConnectionError("connect", problem, LOOPBACK_REMEDY, where=self.where) from None
                if now_s + pause_s >= deadline_s:
                    raise _unreachable(error, self.where, timeout_s) from None
            # A server that is not there yet gives no event to wait for.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def redial(self, deadline_s: float) -> Link | None:
        """The next link, after one has broken; None: not by then, or `give_up` was called.

        Raises StoreError when there is no hope: nobody listens there any more, it is another server, we are too late.
        """
        while True:
            # A link that broke soon after the last one may do so again.
            now_s = time.monotonic()
            self._num_vain = self._num_vain + 1 if now_s - self._redialed_s < _CALM_S else 0
            pause_s = min(_FIRST_PAUSE_S * (1 << min(self._num_vain, 8)), _LONGEST_PAUSE_S) if self._num_vain else 0.0
            self._redialed_s = now_s
            if time.monotonic() + pause_s >= deadline_s or self._is_over.wait(pause_s):
                return None
            try:
                return self.attempt(deadline_s)
            except ConnectionRefusedError:
                raise StoreConnectionError("connect", "nobody listens there any more", where=self.where) from None
            except (OSError, WireError):
                continue

    def give_up(self) -> None:
        """Let `redial` return."""
        self._is_over.set()

    def attempt(self, deadline_s: float, attempt_s: float | None = None) -> Link:
        """A link to the server, or to its standby if that has taken over; `attempt_s` for each, None: as is best.

        Raises ConnectionRefusedError when nobody listens at either address, else what was wrong with the last one.
        """
        standby = self.standby
        if standby is None:
            return self._reach(self.address, deadline_s, attempt_s or ATTEMPT_S)
        attempt_s = attempt_s or min(ATTEMPT_S, _DIVIDED_S * (1 << min(self._num_vain, 4)))
        try:
            return self._reach(self.address, deadline_s, attempt_s)
        except (OSError, WireError, SessionGoneError, StoreAuthError) as error:
            # Another's store may be there by now.
            first: Exception = error
        try:
            link = self._reach(standby, deadline_s, attempt_s)
        except ConnectionRefusedError:
            # It is of no use; the server itself may live, and then names another.
            self.standby = None
            raise first from None
        self.address = standby
        return link

    def _reach(self, address: Address, deadline_s: float, attempt_s: float) -> Link:
        deadline_s = min(deadline_s, time.monotonic() + attempt_s)
        connection = _connected(address, deadline_s)
        try:
            set_options(connection)
            # What a kernel passes from one of its processes to another goes over no network.
            if self._tls is None or is_unix(address[0]):
                return self._shake_hands(connection, b"", deadline_s)
            return self._shake_hands(*self._tls.secure(connection, deadline_s, self.where), deadline_s)
        except BaseException as error:
            connection.close()
            refusal = None if self._tls is None else self._tls.refusal(error, self.where)
            if refusal is not None:
                raise refusal from None
            raise

    def _shake_hands(self, connection: socket.socket | TlsSocket, certificate: bytes, deadline_s: float) -> Link:
        decoder = Decoder(HANDSHAKE_FRAME_BYTES)
        handshake = ClientHandshake(self._token, self.where, self._session, certificate, self.vote)
        answer = handshake.answer(_receive(connection, decoder, deadline_s)[0])
        connection.sendall(encode(answer))
        verdict, *others = _receive(connection, decoder, deadline_s)
        frame_bytes = handshake.conclude(verdict)
        self._session = handshake.session
        self.standby = handshake.standby
        for message in others:
            # The welcome may have waited for the standby, and the news of it come right behind.
            match message:
                case [int(number), _, standby] if number == NEWS:
                    self.standby = to_address(standby)
        decoder.max_frame_bytes = frame_bytes
        # From here on the kernel's timers are used: Python's would cost a poll() for each operation.
        connection.settimeout(None)
        return Link(connection, decoder, frame_bytes)


def _connected(address: Address, deadline_s: float) -> socket.socket:
    host, port = address
    if is_unix(host):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_remaining(deadline_s))
            connection.connect(unix_path(host))
        except BaseException:
            connection.close()
            raise
        return connection
    try:
        return socket.create_connection(
            (lookup_name(host), port),  # type: ignore[arg-type] # it looks the host up, and no more
            timeout=_remaining(deadline_s),
            all_errors=True,
        )
    except ExceptionGroup as group:
        # A name may have many addresses: who is silent at one of them is not dead since another refuses.
        errors = [error for error in group.exceptions if isinstance(error, OSError)]
        silent = [error for error in errors if isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH]
        raise (silent or errors)[-1] from None


def _receive(connection: socket.socket | TlsSocket, decoder: Decoder, deadline_s: float) -> list[Message]:
    while True:
        connection.settimeout(_remaining(deadline_s))
        try:
            data = connection.recv(HANDSHAKE_FRAME_BYTES)
        except BlockingIOError:
            # Not a whole record of TLS yet; there may be no end of those that hold nothing.
            if time.monotonic() >= deadline_s:
                raise TimeoutError("the handshake takes too long") from None
            continue
        if not data:
            raise ConnectionResetError("it hung up during the handshake")
        if messages := decoder.feed(data):
            return messages


def _remaining(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())


def _unreachable(error: OSError | WireError, where: str, timeout_s: float) -> StoreConnectionError:
    if isinstance(error, socket.gaierror):
        problem, remedy = f"the host name does not resolve ({error.strerror})", "Check the name, or give an address."
    elif isinstance(error, StoreError):
        problem, remedy = error.problem.rstrip("."), error.remedy
    elif isinstance(error, ConnectionRefusedError):
        problem, remedy = "nobody listens there", "See whether the server was started, and with this port."
    elif isinstance(error, TimeoutError):
        problem = "there is no answer"
        remedy = "See whether a firewall is in between, and whether it is a disttrain store that listens there."
    else:
        problem, remedy = str(error).rstrip("."), "Check host and port; see whether a disttrain store listens there."
    # The words in brackets are torch's: programs look for them.
    words = f"the client socket has timed out after {timeout_s * 1e3:.0f}ms while trying to connect to {where}"
    problem = f"no store within {timeout_s:.3g} s: {problem} ({words})."
    return StoreConnectionError("connect", problem, remedy, where=where)
