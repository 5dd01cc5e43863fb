"""The store's server on pyuv: libuv's own callbacks, the shortest way from a socket to the hub."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import pyuv

from disttrain.store.serving.shell import AnyHub, Shell, shown_address

BACKLOG = 4096


class _Peer:
    __slots__ = ("_closed", "_descriptor", "_handle", "_has_queue", "_shell", "connection", "name")

    def __init__(self, shell: PyuvShell, handle: Any) -> None:
        self._shell = shell
        self._handle = handle
        self._descriptor: int = handle.fileno()
        self._has_queue = False
        self._closed = False
        self.name = shown_address(handle.getpeername())
        self.connection = -1

    def write(self, data: bytes) -> int:
        if self._closed:
            return 0
        if not self._has_queue or not self._handle.write_queue_size:
            try:
                # Not the handle's try_write: libuv would tell epoll about this socket after each reply.
                num_written = os.write(self._descriptor, data)
            except BlockingIOError:
                num_written = 0
            except OSError:
                self.abort()
                return 0
            self._has_queue = num_written < len(data)
            if not self._has_queue:
                return 0
            data = data[num_written:]
        self._handle.write(data)
        num_unread_bytes: int = self._handle.write_queue_size
        return num_unread_bytes

    def read(self, _handle: Any, data: bytes | None, _error: int | None) -> None:
        if data is None:
            self.abort()
        else:
            self._shell.received(self.connection, data)

    def close(self) -> None:
        if self._closed:
            return
        if self._handle.write_queue_size:
            self._handle.stop_read()
            self._handle.shutdown(lambda _handle, _error: self.abort())
        else:
            self.abort()

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._handle.close(lambda _handle: self._shell.lost(self.connection))


class PyuvShell(Shell):
    """See `Shell`."""

    def __init__(self, hub: AnyHub, linger_s: float, released: Callable[[], None]) -> None:
        super().__init__(hub, linger_s, released)
        self._loop = pyuv.Loop()
        self._stream: Any = pyuv.TCP
        """The kind of its connections."""
        self._server: Any = None
        self._timer = pyuv.Timer(self._loop)
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = pyuv.Async(self._loop, self._call)
        self._watched: dict[socket.socket, Any] = {}

    def run(self, listener: socket.socket, parent: int) -> None:
        if listener.family == socket.AF_UNIX:
            self._stream = pyuv.Pipe
        self._server = self._stream(self._loop)
        self._server.open(listener.detach())
        self._server.listen(self._accept, BACKLOG)
        pipe = pyuv.Pipe(self._loop)
        pipe.open(parent)
        pipe.start_read(lambda _pipe, data, _error: self.parent_gone() if data is None else None)
        self._loop.run()

    def stop(self) -> None:
        self._loop.stop()

    def stop_listening(self) -> None:
        self._server.close()

    def call_soon(self, function: Callable[[], None]) -> None:
        self._calls.append(function)
        self._wake.send()

    def watch(self, connection: socket.socket, readable: Callable[[], None]) -> None:
        poll = self._watched[connection] = pyuv.Poll(self._loop, connection.fileno())
        poll.start(pyuv.UV_READABLE, lambda _poll, _events, _error: readable())

    def unwatch(self, connection: socket.socket) -> None:
        self._watched.pop(connection).close()

    def _call(self, _wake: Any) -> None:
        # libuv makes one call of several wake-ups.
        while self._calls:
            self._calls.popleft()()

    def start_timer(self, delay_s: float) -> None:
        self._timer.start(lambda _timer: self.tick(), delay_s, 0.0)

    def _accept(self, server: Any, error: int | None) -> None:
        if error is not None:
            return
        handle = self._stream(self._loop)
        try:
            server.accept(handle)
            peer = _Peer(self, handle)
        except pyuv.error.UVError:
            # It has gone already.
            handle.close()
            return
        peer.connection = self.connected(peer)
        handle.start_read(peer.read)


def make(hub: AnyHub, linger_s: float, released: Callable[[], None]) -> Shell:
    """The shell; both engines' modules have this function."""
    return PyuvShell(hub, linger_s, released)
