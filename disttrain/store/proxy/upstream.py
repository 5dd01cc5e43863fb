"""A proxy's connection to the server: sends what has come by then in one piece, and connects anew when it breaks.

All but connecting happens in the loop of the shell.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from disttrain.errors import StoreError
from disttrain.store.connection.dial import Dialer, Link
from disttrain.store.protocol.handshake import to_address
from disttrain.store.protocol.sessions import SESSION_S
from disttrain.store.protocol.wire import COUNTED, NEWS, NOT_A_REQUEST, Message, Op, WireError, encode
from disttrain.store.proxy.address import UpstreamAddress
from disttrain.store.proxy.hub import ProxyHub
from disttrain.store.serving.shell import Shell

if TYPE_CHECKING:
    from disttrain.store.tls.records import Tunnel
    from disttrain.store.tls.socket import ClientTls

_READ_BYTES: Final = 256 << 10
_QUIET_S: Final = 0.0005
_LEAVING: Final = 0
"""The number of a request that has no answer."""


class Upstream:
    """The link of `hub` to the server at `address`, in the loop of `shell`."""

    def __init__(
        self, address: UpstreamAddress, token: str | None, tls: ClientTls | None, hub: ProxyHub, shell: Shell
    ) -> None:
        """Raises StoreError where there is no server."""
        self._dialer = Dialer(address.host, address.port, token, tls, standby=address.standby)
        self._hub = hub
        self._shell = shell
        self._is_writing = False
        self._is_due = False
        self._socket: socket.socket
        self._tunnel: Tunnel | None = None
        self._link: Link | None = self._dialer.dial(address.timeout_s)
        self._is_over = False
        self._flushed_s = float("-inf")
        hub.send = self._send
        self._begin()

    def close(self) -> None:
        """Say that this proxy does not come back; once the loop has ended."""
        self._is_over = True
        self._dialer.give_up()
        if self._link is not None:
            try:
                self._link.socket.sendall(encode([_LEAVING, int(Op.LEAVE)]))
            except OSError:
                return  # It has gone, or does not read: it will notice.

    def _begin(self) -> None:
        assert self._link is not None
        self._link.socket.settimeout(0.0)
        self._hub.forwarding.frame_bytes = self._link.frame_bytes
        link = self._link.socket
        self._socket, self._tunnel = (link, None) if isinstance(link, socket.socket) else link.parts
        self._shell.watch(self._socket, self._readable)
        if self._tunnel is not None:
            # The server's first words may have come with its welcome.
            self._shell.call_soon(lambda: self._received(b""))

    def _send(self, now_s: float) -> None:
        """At once where no answer is to come soon, or after a quiet time; else with what the loop still has to read."""
        if self._is_due:
            return
        if not self._hub.forwarding.awaits_answers or now_s - self._flushed_s > _QUIET_S:
            self._flush()
        else:
            self._is_due = True
            self._shell.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        self._flushed_s = time.monotonic()
        if self._link is None or self._is_writing:
            return
        data = b"".join(self._hub.forwarding.frames())
        if refused := self._hub.refused():
            self._shell.carry_out(refused)
        self._write(data)

    def _write(self, data: bytes) -> None:
        if self._tunnel is not None and data:
            data = self._tunnel.seal(data)
        try:
            num_sent = self._socket.send(data) if data else 0
        except BlockingIOError:
            num_sent = 0
        except OSError:
            self._broken()
            return
        if num_sent < len(data):
            # The server is busy: the loop does not wait for it.
            self._is_writing = True
            threading.Thread(target=self._write_rest, args=(self._socket, data[num_sent:]), daemon=True).start()

    def _write_rest(self, connection: socket.socket, data: bytes) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLOUT)
        try:
            while data and connection.fileno() >= 0:
                poll.poll(1e3)
                try:
                    data = data[connection.send(data) :]
                except BlockingIOError:
                    continue
        except OSError:
            pass  # The reader finds that out, too.
        self._shell.call_soon(lambda: self._written(connection))

    def _written(self, connection: socket.socket) -> None:
        if self._link is not None and connection is self._socket:
            self._is_writing = False
            self._flush()

    def _readable(self) -> None:
        if self._link is None:
            return
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._received(data)
        else:
            self._broken()

    def _received(self, data: bytes) -> None:
        if self._link is None:
            return
        try:
            if self._tunnel is not None:
                self._tunnel.write_wire(data)
                data = self._tunnel.read_all()
            messages = self._link.decoder.feed(data) if data else []
        except WireError as error:
            self._lose(error.problem)
            return
        except OSError:  # of OpenSSL: the stream makes no sense any more
            self._broken()
            return
        if answers := [message for message in messages if message[0] >= 0 or self._hear(message)]:
            self._shell.carry_out(self._hub.answered(answers))

    def _hear(self, message: Message) -> bool:
        """Takes what the server says unasked."""
        if message[0] == NEWS:
            self._dialer.standby = to_address(message[2])
        elif message[0] == NOT_A_REQUEST:
            self._lose(f"the server hung up: {message[2]}")
        is_for_clients: bool = message[0] == COUNTED
        return is_for_clients

    def _broken(self) -> None:
        self._shell.unwatch(self._socket)
        self._socket.close()
        self._link = None
        threading.Thread(target=self._redial, name="upstream", daemon=True).start()

    def _redial(self) -> None:
        try:
            link = self._dialer.redial(time.monotonic() + SESSION_S)
        except StoreError as error:
            reason = error.problem
            self._shell.call_soon(lambda: self._lose(reason))
            return
        if link is None:
            self._shell.call_soon(lambda: self._lose(f"there was no way to it for {SESSION_S:g} s"))
        else:
            self._shell.call_soon(lambda: self._resume(link))

    def _resume(self, link: Link) -> None:
        if self._is_over:
            return
        self._link = link
        self._is_writing = False
        self._begin()
        self._write(b"".join(self._hub.forwarding.frames_again()))
        self._flush()

    def _lose(self, reason: str) -> None:
        """Without a server a proxy is of no use: its clients are to find nobody any more."""
        if not self._is_over:
            self._is_over = True
            self._shell.end(f"the server is gone: {reason.rstrip('.')}")
