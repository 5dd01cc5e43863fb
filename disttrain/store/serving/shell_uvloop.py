"""The store's server on uvloop: libuv behind asyncio's protocols, where pyuv cannot be imported."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import cast

import uvloop

from disttrain.store.serving.shell import AnyHub, Shell, shown_address

BACKLOG = 4096


class _Peer(asyncio.Protocol):
    def __init__(self, shell: UvloopShell) -> None:
        self._shell = shell
        self._transport: asyncio.Transport | None = None
        self._connection = -1
        self.name = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.name = shown_address(transport.get_extra_info("peername"))
        self._connection = self._shell.connected(self)

    def data_received(self, data: bytes) -> None:
        self._shell.received(self._connection, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shell.lost(self._connection)

    def write(self, data: bytes) -> int:
        assert self._transport is not None
        if self._transport.is_closing():
            return 0
        self._transport.write(data)
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()


class UvloopShell(Shell):
    """See `Shell`."""

    def __init__(self, hub: AnyHub, linger_s: float, released: Callable[[], None]) -> None:
        super().__init__(hub, linger_s, released)
        self._loop = uvloop.new_event_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._server: asyncio.AbstractServer | None = None

    def run(self, listener: socket.socket, parent: int) -> None:
        listener.setblocking(False)
        is_unix = listener.family == socket.AF_UNIX
        create = self._loop.create_unix_server if is_unix else self._loop.create_server
        self._server = self._loop.run_until_complete(create(lambda: _Peer(self), sock=listener, backlog=BACKLOG))
        self._loop.add_reader(parent, self._parent_wrote, parent)
        self._loop.run_forever()

    def stop(self) -> None:
        self._loop.stop()

    def stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()

    def call_soon(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def watch(self, connection: socket.socket, readable: Callable[[], None]) -> None:
        self._loop.add_reader(connection, readable)

    def unwatch(self, connection: socket.socket) -> None:
        self._loop.remove_reader(connection)

    def start_timer(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self.tick)

    def _parent_wrote(self, parent: int) -> None:
        if not os.read(parent, 4096):
            self._loop.remove_reader(parent)
            self.parent_gone()


def make(hub: AnyHub, linger_s: float, released: Callable[[], None]) -> Shell:
    """The shell; both engines' modules have this function."""
    return UvloopShell(hub, linger_s, released)
