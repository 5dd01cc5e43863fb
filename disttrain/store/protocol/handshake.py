"""The begin of a connection, from each side: hello, answer, verdict. Messages in, messages out; no sockets.

    server: [MAGIC, version, server_nonce]          an empty nonce: this server has no token and asks for none
                                                    TLS_ONLY in its place: you should have begun with TLS
    client: [version, client_nonce, client_proof, session, vote]    an empty session: a new client; see `Votes`
    server: [OK, server_proof, frame_bytes, session, standby]   or [another status, sentence], and the connection ends

`standby` is the [host, port] of the one that would take over, or None. The client sends no more than this one frame
before it has seen the server's proof.
"""

from __future__ import annotations

import os
from typing import Final

from disttrain.errors import StoreAuthError, StoreConnectionError, StoreError, StoreLimitError
from disttrain.store.protocol.auth import client_proof, is_nonce, new_nonce, same, server_proof
from disttrain.store.protocol.wire import PROTOCOL_VERSION, Address, Message, Status

MAGIC: Final = "disttrain store"
SESSION_BYTES: Final = 16
TLS_ONLY: Final = "TLS"
MAX_HOST_CHARS: Final = 253
"""Of a name in the DNS; the server's verdict has to fit into a small frame."""


Votes = dict[bytes, tuple[int, float]]
"""The terms in which electors, by session, have sided with a standby, and when they said so last."""


class SessionGoneError(StoreError):
    """The server at this address does not know us any more: it is another one, or we were away too long."""


class StandbyError(StoreConnectionError):
    """The server at this address is a standby that has not taken over."""


def to_address(plain: object) -> Address | None:
    """A standby's address as it travels; None: there is none, or nobody could connect to it."""
    match plain:
        case [str(host), int(port)] if 0 < len(host) <= MAX_HOST_CHARS and host.isprintable() and 0 < port < 1 << 16:
            try:
                host.encode("idna")
            except UnicodeError:
                return None
            return host, port
    return None


class ServerHandshake:
    """The server's side of one connection; `certificate` is the digest of the server's own, b"" without TLS."""

    def __init__(self, token: str | None, certificate: bytes = b"") -> None:
        self._token = token
        self._certificate = certificate
        self._nonce = b"" if token is None else new_nonce()
        self.session = b""
        """The name of the client's session, once there is a verdict; `resumes`: it had one already."""
        self.resumes = False
        self.vote = 0
        """For a standby: the term in which this client, an elector, has sided with it."""

    def hello(self) -> Message:
        """The first message of the server."""
        return [MAGIC, PROTOCOL_VERSION, self._nonce]

    def verdict(self, answer: Message, frame_bytes: int, standby: Address | None = None) -> Message:
        """The server's verdict on the client's answer; the connection is open when the status is OK."""
        if not answer or type(answer[0]) is not int:
            return [int(Status.REFUSED), "This is a disttrain store; the client's first frame is not of its protocol."]
        if answer[0] != PROTOCOL_VERSION:
            return [int(Status.REFUSED), f"The server speaks version {PROTOCOL_VERSION}, the client {answer[0]}."]
        if len(answer) != 5 or type(answer[3]) is not bytes or type(answer[4]) is not int:
            return [int(Status.REFUSED), "This is a disttrain store; the client's first frame is not of its protocol."]
        _, nonce, proof, session, self.vote = answer
        self.resumes = bool(session)
        self.session = session or os.urandom(SESSION_BYTES)
        if self._token is None:
            return [int(Status.OK), b"", frame_bytes, self.session, standby]
        if not is_nonce(nonce) or not same(proof, client_proof(self._token, self._nonce, nonce, self._certificate)):
            return [int(Status.REFUSED), "The client's token is not the server's."]
        own_proof = server_proof(self._token, self._nonce, nonce, self._certificate)
        return [int(Status.OK), own_proof, frame_bytes, self.session, standby]


class ClientHandshake:
    """The client's side of one connection to the store at `where`; `session` is what the last one was given.

    `certificate` is the digest of the one that the server has shown, b"" without TLS.
    """

    def __init__(
        self, token: str | None, where: str, session: bytes = b"", certificate: bytes = b"", vote: int = 0
    ) -> None:
        self.session = session
        self._vote = vote
        self.standby: Address | None = None
        """The standby that would take over from this server."""
        self._certificate = certificate
        self._token = token
        self._where = where
        self._client_nonce = b""
        self._server_nonce = b""

    def answer(self, hello: Message) -> Message:
        """The client's answer to the server's hello. Raises when the two cannot work together."""
        if len(hello) != 3 or hello[0] != MAGIC:
            raise self._stranger()
        _, version, nonce = hello
        if version != PROTOCOL_VERSION:
            problem = f"the server speaks version {version!r} of the store's protocol, we speak {PROTOCOL_VERSION}."
            raise StoreAuthError("connect", problem, "Use the same disttrain on all nodes.", where=self._where)
        if nonce == TLS_ONLY:
            raise StoreAuthError(
                "connect",
                "the server speaks TLS only, and we were told of no certificate authority.",
                "Set DISTTRAIN_STORE_TLS_CA to the file with the job's authority.",
                where=self._where,
            )
        if self._token is None:
            if nonce != b"":
                raise StoreAuthError(
                    "connect",
                    "the server asks for the job's token and we have none.",
                    "Pass token=read_token(path), or set DISTTRAIN_TOKEN_FILE to the job's token file.",
                    where=self._where,
                )
            return [PROTOCOL_VERSION, b"", b"", self.session, self._vote]
        if not is_nonce(nonce):
            raise StoreAuthError(
                "connect",
                "we have a token and the server asks for none, so it cannot prove that it belongs to the job.",
                "Start the server with the same token, or unset DISTTRAIN_TOKEN_FILE on this side.",
                where=self._where,
            )
        self._server_nonce, self._client_nonce = nonce, new_nonce()
        proof = client_proof(self._token, nonce, self._client_nonce, self._certificate)
        return [PROTOCOL_VERSION, self._client_nonce, proof, self.session, self._vote]

    def conclude(self, verdict: Message) -> int:
        """The largest frame that the server takes.

        Raises StoreAuthError when it refused us or proves nothing, SessionGoneError when it does not know us any more,
        StoreLimitError when it has too many clients, StandbyError when it serves nobody yet.
        """
        if verdict[:1] == [Status.REFUSED]:
            raise StoreAuthError(
                "connect", " ".join(map(str, verdict[1:])), "Use the job's token file and version.", where=self._where
            )
        if verdict[:1] == [Status.LIMIT]:
            remedy = "Use fewer connections, or raise the limit where the server is started."
            raise StoreLimitError("connect", " ".join(map(str, verdict[1:])), remedy, where=self._where)
        if verdict[:1] == [Status.GONE]:
            raise SessionGoneError("connect", " ".join(map(str, verdict[1:])), where=self._where)
        if verdict[:1] == [Status.STANDBY]:
            raise StandbyError("connect", " ".join(map(str, verdict[1:])), where=self._where)
        if len(verdict) != 5 or verdict[0] != Status.OK or (type(verdict[2]), type(verdict[3])) != (int, bytes):
            raise self._stranger()
        if self._token is not None:
            expected = server_proof(self._token, self._server_nonce, self._client_nonce, self._certificate)
            if not same(verdict[1], expected):
                problem = "the server could not prove that it knows the job's token."
                raise StoreAuthError("connect", problem, "See who listens at this address.", where=self._where)
        frame_bytes: int = verdict[2]
        self.session = verdict[3]
        self.standby = to_address(verdict[4])
        return frame_bytes

    def _stranger(self) -> StoreConnectionError:
        return StoreConnectionError(
            "connect", "what listens there is not a disttrain store.", "Check host and port.", where=self._where
        )
