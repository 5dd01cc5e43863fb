"""The job's token: a peer that does not know it gets nothing from the store, and learns nothing about it.

Challenge and response with HMAC-SHA256 (RFC 2104). The server sends a fresh nonce; the client answers with its own
nonce and a MAC over both; the server answers with another MAC over both. A role in each MAC keeps one side's response
from being reflected as the other's, and the two nonces keep a response from being used again on another connection.

Over TLS the MACs cover the server's certificate as well (its SHA-256, in the spirit of RFC 5929, tls-server-end-point).
So a man in the middle who has a certificate of the same authority, but not the token, cannot relay proofs.

Worker processes get the token in a file that only its owner can read, never in arguments or environment.
"""

from __future__ import annotations

import hmac
import os
import stat
from typing import Final

from disttrain.errors import StoreAuthError

NONCE_BYTES: Final = 32
TOKEN_BYTES: Final = 32
MIN_TOKEN_CHARS: Final = 16
_CLIENT: Final = b"disttrain store v1 client"
_SERVER: Final = b"disttrain store v1 server"
_MAKE_ONE: Final = "Make one with `disttrain.store.write_token(path)` and name it in DISTTRAIN_TOKEN_FILE."


def new_token() -> str:
    """A fresh random token: 64 hexadecimal digits."""
    return os.urandom(TOKEN_BYTES).hex()


def write_token(path: str | os.PathLike[str], token: str | None = None) -> str:
    """Write `token` (None: a new one) to a new file that only we can read; returns it.

    Raises StoreAuthError when the file exists already (it may be in use) or cannot be written.
    """
    token = _checked_token("write_token", token) if token is not None else new_token()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise StoreAuthError("write_token", f"{path} exists already.", "Use it, or remove it first.") from None
    except OSError as error:
        raise StoreAuthError("write_token", f"{path} cannot be written: {error.strerror}.") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def read_token(path: str | os.PathLike[str]) -> str:
    """The token in the file at `path`.

    Raises StoreAuthError unless the file is ours, nobody else can read or write it, and it holds a token.
    """
    try:
        # Without waiting: a pipe that nobody writes to would hold us for ever.
        with open(path, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            text = file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise StoreAuthError("read_token", f"{path} cannot be read: {reason}.", _MAKE_ONE) from None
    if not stat.S_ISREG(status.st_mode):
        raise StoreAuthError("read_token", f"{path} is not a regular file.", _MAKE_ONE)
    if status.st_uid != os.geteuid():
        raise StoreAuthError(
            "read_token",
            f"{path} belongs to user {status.st_uid}; we are user {os.geteuid()}.",
            "A token file must be our own. Copy it to a file of mode 0600.",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise StoreAuthError(
            "read_token",
            f"{path} has mode {mode:04o}; others may use it.",
            f"Run `chmod 600 {path}`, or make a new one.",
        )
    return _checked_token("read_token", text.strip(), str(path))


def _checked_token(operation: str, token: str, where: str = "") -> str:
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        problem = f"a token has at least {MIN_TOKEN_CHARS} printable ASCII characters and no space; this one does not."
        raise StoreAuthError(operation, problem, _MAKE_ONE, where=where)
    return token


def new_nonce() -> bytes:
    """A challenge: random, used once."""
    return os.urandom(NONCE_BYTES)


def client_proof(token: str, server_nonce: bytes, client_nonce: bytes, certificate: bytes = b"") -> bytes:
    """The proof of a client that it knows the token; `certificate`: digest of the server's, b"" without TLS."""
    return _mac(token, _CLIENT, server_nonce, client_nonce, certificate)


def server_proof(token: str, server_nonce: bytes, client_nonce: bytes, certificate: bytes = b"") -> bytes:
    """The proof of a server that it knows the token too."""
    return _mac(token, _SERVER, server_nonce, client_nonce, certificate)


def same(proof: object, expected: bytes) -> bool:
    """Compare in constant time; False for anything that is not bytes."""
    return type(proof) is bytes and hmac.compare_digest(proof, expected)


def is_nonce(value: object) -> bool:
    """True for bytes of a nonce's size: fixed sizes keep two different pairs from giving the same MAC input."""
    return type(value) is bytes and len(value) == NONCE_BYTES


def _mac(token: str, role: bytes, server_nonce: bytes, client_nonce: bytes, certificate: bytes) -> bytes:
    return hmac.digest(token.encode(), role + server_nonce + client_nonce + certificate, "sha256")
