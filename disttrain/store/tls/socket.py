"""The client's TLS: the methods of a socket that `channel` and `dial` use, for one thread that reads while another
sends.

`ssl.SSLSocket` does not allow that before Python 3.13. Here a lock is held for the cryptography alone, never while the
kernel sends or receives, so neither thread delays the other.

This module loads `ssl`; import it only where there are certificates.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import Final

from disttrain.errors import StoreAuthError, StoreConnectionError
from disttrain.store.protocol.handshake import MAGIC, TLS_ONLY
from disttrain.store.protocol.wire import HANDSHAKE_FRAME_BYTES, Decoder, WireError
from disttrain.store.tls.certificates import Certificates
from disttrain.store.tls.records import RECORD_BYTES, Tunnel, make_context

_CHUNK_BYTES: Final = 256 << 10
_RECEIVE_BYTES: Final = RECORD_BYTES + 512
"""A record, and what TLS puts around it."""


class TlsSocket:
    """A connected socket inside TLS. One thread may send and one receive at a time.

    `recv` raises BlockingIOError, as a socket with a kernel's timer does, also when what came is not a whole record.
    """

    def __init__(self, connection: socket.socket, tunnel: Tunnel) -> None:
        self._connection = connection
        self._tunnel = tunnel
        self._lock = threading.Lock()
        # Read and not yet deciphered; belongs to the thread that receives.
        self._received: list[bytes] = []
        # Sealed and not yet sent; belongs to the thread that sends.
        self._unsent = b""
        self.close = connection.close
        self.settimeout = connection.settimeout
        self.setsockopt = connection.setsockopt
        self.shutdown = connection.shutdown

    @property
    def parts(self) -> tuple[socket.socket, Tunnel]:
        """The socket and its TLS, for an event loop, which is one thread."""
        return self._connection, self._tunnel

    def sendall(self, data: bytes) -> None:
        """Send all of `data`, or raise what the socket raises; then the connection is of no further use."""
        for start in range(0, len(data), _CHUNK_BYTES):
            sealed = self._seal(data[start : start + _CHUNK_BYTES])
            self._connection.sendall(sealed)

    def send(self, data: bytes, flags: int) -> int:
        """Take all of `data`, and send as much as goes with `flags`; the rest goes before what is sent next."""
        self._unsent = self._seal(data)
        try:
            self._unsent = self._unsent[self._connection.send(self._unsent, flags) :]
        except BlockingIOError:
            # There is no room at all.
            pass
        return len(data)

    def recv(self, num_bytes: int) -> bytes:
        """Plain bytes of one record, b"" at the end; asks the kernel once at most, for `num_bytes` or a record."""
        with self._lock:
            has_more = self._tunnel.has_more
        if not has_more and not self._received:
            # One call into C from the socket to the list, so that no signal handler that raises comes in between.
            self._received.extend(map(self._connection.recv, (max(num_bytes, _RECEIVE_BYTES),)))
        if self._received and not self._received[-1]:
            return b""
        try:
            with self._lock:
                if self._received:
                    self._tunnel.write_wire(self._received.pop())
                return self._tunnel.read()
        except ssl.SSLWantReadError:
            raise BlockingIOError from None
        except OSError:
            raise
        except BaseException:
            # Bytes may be lost on their way through: this stream ends, and who waits for an answer asks again.
            self._end()
            raise

    def _seal(self, data: bytes) -> bytes:
        with self._lock:
            sealed, self._unsent = self._unsent + self._tunnel.seal(data), b""
        return sealed

    def _end(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other side was first.
            pass


class ClientTls:
    """Puts the links of one client, and of its clones, into TLS; `where`, in what follows, is the server's address."""

    def __init__(self, certificates: Certificates) -> None:
        """Reads the files; raises SettingError for those that cannot be used."""
        self._context = make_context(certificates, is_server=False)

    def secure(self, connection: socket.socket, deadline_s: float, where: str) -> tuple[TlsSocket, bytes]:
        """`connection` inside TLS, and the digest of the server's certificate; a broken handshake raises OSError."""
        tunnel = Tunnel(self._context, is_server=False)
        try:
            while not tunnel.shake_hands():
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    # Records without an end keep no client beyond its time.
                    raise TimeoutError("the handshake of TLS takes too long")
                connection.settimeout(remaining_s)
                connection.sendall(tunnel.flush())
                data = connection.recv(_CHUNK_BYTES)
                if not data:
                    raise ConnectionResetError("it hung up during the handshake of TLS")
                if not tunnel.num_bytes:
                    _check_first(data, where)
                tunnel.num_bytes += len(data)
                tunnel.write_wire(data)
        except ssl.SSLError:
            # So that the server can say why, too.
            connection.sendall(tunnel.flush())
            raise
        connection.sendall(tunnel.flush())
        return TlsSocket(connection, tunnel), tunnel.peer_digest()

    def refusal(self, error: BaseException, where: str) -> StoreAuthError | None:
        """The error to raise in place of `error`, when it says that the certificates don't fit."""
        if isinstance(error, ssl.SSLCertVerificationError):
            problem = f"the server's certificate is not one of the job's: {error.verify_message}."
        elif isinstance(error, ssl.SSLError) and error.reason and "ALERT" in error.reason:
            words = error.reason.partition("ALERT_")[2].lower().replace("_", " ")
            problem = f"the server does not take us over TLS: {words}."
        else:
            return None
        remedy = "See DISTTRAIN_STORE_TLS_CA and DISTTRAIN_STORE_TLS_CERT, on both sides, and when they expire."
        return StoreAuthError("connect", problem, remedy, where=where)


def _check_first(data: bytes, where: str) -> None:
    """Raise if the server does not speak TLS; a store speaks first there."""
    if MAGIC.encode() not in data:
        return
    try:
        hello = Decoder(HANDSHAKE_FRAME_BYTES).feed(data)
    except WireError:
        return
    if hello and hello[0][-1:] == [TLS_ONLY]:
        # It took us for a client without TLS, so late did we come.
        raise StoreConnectionError("connect", "the server waited in vain for TLS", where=where)
    raise StoreAuthError(
        "connect",
        "the server does not speak TLS, and we speak nothing else.",
        "Start it with a certificate (DISTTRAIN_STORE_TLS_CERT), or unset DISTTRAIN_STORE_TLS_CA here.",
        where=where,
    )
