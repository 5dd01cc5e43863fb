"""Which of this machine's addresses others can reach."""

from __future__ import annotations

import contextlib
import socket


def own_address(host: str) -> str:
    """The address of this node that packets to `host` leave from, which others that reach `host` can reach too."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
