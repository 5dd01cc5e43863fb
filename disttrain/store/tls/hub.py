"""The server's TLS: a hub around the hub. Bytes of the wire in, actions with bytes of the wire out; no sockets.

The shells, with either engine, see no difference. The inner hub limits the time and the frames of peers that have
proved nothing; this hub limits the bytes of TLS itself.

This module loads `ssl`; import it only where there are certificates.
"""

from __future__ import annotations

import ssl
from typing import Final

from disttrain.store.protocol.handshake import MAGIC, TLS_ONLY, Votes
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.wire import PROTOCOL_VERSION, encode
from disttrain.store.serving.hub import Hub
from disttrain.store.standby.journal import Action
from disttrain.store.standby.replica import Replica
from disttrain.store.tls.certificates import Certificates
from disttrain.store.tls.records import Tunnel, digest_of, make_context, reason_of

HANDSHAKE_BYTES: Final = 32 << 10
"""The bytes that a peer may send, certificates and all, until it has proved that it knows the token."""


class TlsHub:
    """A hub behind TLS: for the shells it is one like `Hub`, with bytes of the wire in place of plain ones."""

    def __init__(
        self, token: str | None, limits: Limits, certificates: Certificates, *, votes: Votes | None = None
    ) -> None:
        """Raises SettingError for files that cannot be used."""
        self._context = make_context(certificates, is_server=True)
        self._hub = Hub(token, limits, digest_of(certificates.cert_file), votes=votes)
        self._tunnels: dict[int, Tunnel] = {}

    @property
    def limits(self) -> Limits:
        return self._hub.limits

    @property
    def num_clients(self) -> int:
        return self._hub.num_clients

    @property
    def next_deadline_s(self) -> float | None:
        return self._hub.next_deadline_s

    @property
    def has_new_deadline(self) -> bool:
        return self._hub.has_new_deadline

    @has_new_deadline.setter
    def has_new_deadline(self, value: bool) -> None:
        self._hub.has_new_deadline = value

    def connected(self, connection: int, now_s: float) -> list[Action]:
        """See `Hub.connected`."""
        self._tunnels[connection] = Tunnel(self._context, is_server=True)
        return self._sealed(self._hub.connected(connection, now_s))

    def received(self, connection: int, data: bytes, now_s: float) -> list[Action]:
        """See `Hub.received`."""
        tunnel = self._tunnels.get(connection)
        if tunnel is None:
            return []
        try:
            if tunnel.num_bytes <= HANDSHAKE_BYTES and not self._counted(connection, tunnel, len(data)):
                return self._hang_up(connection, f"more than {HANDSHAKE_BYTES} bytes before authentication", now_s)
            tunnel.write_wire(data)
            if not tunnel.is_open:
                is_open = tunnel.shake_hands()
                actions: list[Action] = [(connection, tunnel.seal(b""), "")]
                if not is_open:
                    return actions
            else:
                actions = []
            if plain := tunnel.read_all():
                actions += self._sealed(self._hub.received(connection, plain, now_s))
        except ssl.SSLError as error:
            return self._hang_up(connection, f"TLS: {reason_of(error)}", now_s)
        return actions

    def disconnected(self, connection: int, now_s: float) -> None:
        """See `Hub.disconnected`."""
        self._tunnels.pop(connection, None)
        self._hub.disconnected(connection, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """See `Hub.tick`."""
        return self._sealed(self._hub.tick(now_s))

    def take_over(self, replica: Replica, now_s: float) -> None:
        """See `Hub.take_over`."""
        self._hub.take_over(replica, now_s)

    @property
    def is_deposed(self) -> bool:
        return self._hub.is_deposed

    def close(self) -> None:
        """See `Hub.close`."""
        self._hub.close()

    def _counted(self, connection: int, tunnel: Tunnel, num_bytes: int) -> bool:
        """True if a peer may send so many bytes more; counts no further once it has proved who it is."""
        tunnel.num_bytes += num_bytes
        if tunnel.num_bytes <= HANDSHAKE_BYTES:
            return True
        return self._hub.is_proved(connection)

    def _sealed(self, actions: list[Action]) -> list[Action]:
        return [(connection, self._on_wire(connection, data, reason), reason) for connection, data, reason in actions]

    def _on_wire(self, connection: int, data: bytes, reason: str) -> bytes:
        # Who is hung up on needs its tunnel no longer.
        tunnel = self._tunnels.pop(connection, None) if reason else self._tunnels.get(connection)
        if tunnel is None:
            # It has gone while its answer waited for the standby, or this is for the log.
            return b""
        if not reason or tunnel.is_open:
            return tunnel.seal(data)
        # It has never said a word: perhaps a client that waits for ours, which in TLS it would have to begin.
        return tunnel.flush() if tunnel.num_bytes else encode([MAGIC, PROTOCOL_VERSION, TLS_ONLY])

    def _hang_up(self, connection: int, reason: str, now_s: float) -> list[Action]:
        last_words = self._tunnels.pop(connection).flush()
        self._hub.disconnected(connection, now_s)
        return [(connection, last_words, reason)]
