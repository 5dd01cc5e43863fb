"""Messages between a training process and its writer: msgpack frames over a Unix socket, with file descriptors.

Source: unix(7), on SCM_RIGHTS.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgpack

_LENGTH_BYTES = 8
_MOST_DESCRIPTORS = 4


class Wire:
    """One end of the connection. Many threads may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._mutex = threading.Lock()

    def send(self, message: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
        """Raises OSError when the other end has gone."""
        body = msgpack.packb(message)
        with self._mutex:
            socket.send_fds(self._connection, [len(body).to_bytes(_LENGTH_BYTES, "little")], list(descriptors))
            self._connection.sendall(body)

    def receive(self) -> tuple[list[Any], list[int]] | None:
        """A message and its descriptors; None when the other end has gone, or will say no more."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._connection, _LENGTH_BYTES, _MOST_DESCRIPTORS)
            head += self._read(_LENGTH_BYTES - len(head)) if head else b""
            body = self._read(int.from_bytes(head, "little")) if head else b""
        except OSError:
            return None
        return (msgpack.unpackb(body, strict_map_key=False), list(descriptors)) if body else None

    def end(self) -> None:
        """Say that no more will be sent."""
        try:
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:  # the other end has gone
            pass

    def close(self) -> None:
        self._connection.close()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        view, done = memoryview(data), 0
        while done < num_bytes:
            num_read = self._connection.recv_into(view[done:])
            if num_read == 0:
                raise ConnectionResetError
            done += num_read
        return bytes(data)
