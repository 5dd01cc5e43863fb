"""The hub of a proxy: clients as a server's hub has them, and behind it a server in place of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.sessions import Session
from disttrain.store.protocol.state import StoreState
from disttrain.store.protocol.wire import Message, Op, Status, encode
from disttrain.store.proxy.forwarding import Forwarding
from disttrain.store.serving.hub import Hub
from disttrain.store.standby.journal import Action

_LONG_AGO_S: Final = float("-inf")


class ProxyHub(Hub):
    """See `Hub`; `forwarding` has what is to be sent to the server."""

    def __init__(self, token: str | None, limits: Limits) -> None:
        super().__init__(token, limits)
        self.forwarding = Forwarding(limits, self._client)
        self.send: Callable[[float], object] = lambda now_s: None
        """Called with the time when there is something to send; also where there was before."""
        # It has the methods of a state that a hub calls for clients; nobody follows a proxy.
        self.state = cast(StoreState, self.forwarding)

    def received(self, connection: int, data: bytes, now_s: float) -> list[Action]:
        """See `Hub.received`; all that has come in `data` is sent on together."""
        actions = super().received(connection, data, now_s)
        if self.forwarding.has_unsent:
            self.send(now_s)
        return actions

    def disconnected(self, connection: int, now_s: float) -> None:
        """See `Hub.disconnected`."""
        peer = self._connections.get(connection)
        if peer is not None and peer.session is not None:
            self.forwarding.cut(connection, peer.session)
            if self._sessions.resume(peer.session.name) is None:
                self.forwarding.forget(peer.session.name)
        super().disconnected(connection, now_s)
        if self.forwarding.has_unsent:
            self.send(now_s)

    def answered(self, messages: list[Message]) -> list[Action]:
        """The server has answered: what goes to clients, one action for each."""
        replies = [reply for message in messages for reply in self.forwarding.answered(message)]
        if self.forwarding.has_unsent:
            self.send(_LONG_AGO_S)
        return [self._woken(replies[0])] if len(replies) == 1 else self._woken_together(replies)

    def refused(self) -> list[Action]:
        """Replies to what was too large to be sent on."""
        return [self._woken(outgoing) for outgoing in self.forwarding.refused()]

    def _special(self, connection: int, session: Session, message: Message, now_s: float) -> bytes | None:
        if len(message) > 1 and message[1] in (Op.FOLLOW, Op.ACK, Op.ELECT):
            return encode([message[0], int(Status.REFUSED), "this is a proxy: ask the server itself."])
        return super()._special(connection, session, message, now_s)

    def _client(self, connection: int) -> Session:
        session = self._connections[connection].session
        assert session is not None
        return session
