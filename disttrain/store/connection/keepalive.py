"""The options of both sides' sockets."""

from __future__ import annotations

import socket
from typing import Final

IDLE_S: Final = 15
INTERVAL_S: Final = 5
NUM_PROBES: Final = 3
UNACKNOWLEDGED_MS: Final = 30_000


def set_options(connection: socket.socket) -> None:
    """For TCP: no delay; and let the kernel notice a peer whose machine or network is gone, within half a minute.

    The kernel's keepalive asks the other machine, not its busy process, so a slow client is not taken for a dead one.
    A listening socket hands these options on to those that it accepts.
    """
    if connection.family == socket.AF_UNIX:
        return  # there is no delay, and the kernel knows who is gone
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", INTERVAL_S),
        ("TCP_KEEPCNT", NUM_PROBES),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
    ):
        # Linux has them all.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
