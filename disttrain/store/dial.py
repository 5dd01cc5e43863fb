"""Connect to a store's server and shake hands; try again until the timeout, for the server may start after us."""

from __future__ import annotations

import socket
import time
from typing import Final

from disttrain.errors import SettingError, StoreAuthError, StoreConnectionError, StoreError
from disttrain.store.channel import Channel
from disttrain.store.handshake import ClientHandshake
from disttrain.store.wire import HANDSHAKE_FRAME_BYTES, Decoder, Message, WireError, encode

ATTEMPT_S: Final = 15.0
"""Longest time that one attempt may take before the next begins."""

_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 1.0


def dial(host: str, port: int, token: str | None, timeout_s: float) -> Channel:
    """A channel to the server at `host`:`port`.

    Raises StoreConnectionError when the timeout is over; at once StoreAuthError when the tokens don't match, and
    SettingError for what cannot be a host name.
    """
    where = f"{host}:{port}"
    deadline_s = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _attempt(host, port, token, where, deadline_s)
        except StoreAuthError:
            raise
        except UnicodeError:
            # The codec of international host names refuses empty labels and long ones.
            problem, remedy = f"{host!r} is not a host name.", "Check it, or give an address."
            raise SettingError("connect", problem, remedy, where=where) from None
        except (OSError, WireError) as error:
            if time.monotonic() + pause_s >= deadline_s:
                raise _unreachable(error, where, timeout_s) from None
        # A server that is not there yet gives no event to wait for.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _attempt(host: str, port: int, token: str | None, where: str, deadline_s: float) -> Channel:
    deadline_s = min(deadline_s, time.monotonic() + ATTEMPT_S)
    connection = socket.create_connection((host, port), timeout=_remaining(deadline_s))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        decoder = Decoder(HANDSHAKE_FRAME_BYTES)
        handshake = ClientHandshake(token, where)
        answer = handshake.answer(_receive(connection, decoder, deadline_s))
        connection.sendall(encode(answer))
        frame_bytes = handshake.conclude(_receive(connection, decoder, deadline_s))
        decoder.max_frame_bytes = frame_bytes
        # From here on the kernel's timers are used: Python's would cost a poll() for each operation.
        connection.settimeout(None)
        return Channel(connection, decoder, frame_bytes, where)
    except BaseException:
        connection.close()
        raise


def _receive(connection: socket.socket, decoder: Decoder, deadline_s: float) -> Message:
    while True:
        connection.settimeout(_remaining(deadline_s))
        data = connection.recv(HANDSHAKE_FRAME_BYTES)
        if not data:
            raise ConnectionResetError("it hung up during the handshake")
        if messages := decoder.feed(data):
            return messages[0]


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
    return StoreConnectionError("connect", f"no store within {timeout_s:.3g} s: {problem}.", remedy, where=where)
