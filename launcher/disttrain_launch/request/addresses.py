"""Finds addresses that stay on this machine, and ports that are free on it."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """True when `host` can only be reached from this machine. A name that does not resolve is not."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def is_ours(host: str) -> bool:
    """True when `host` is an address of this machine."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that nobody listens on now, on any of this machine's addresses."""
    with socket.socket() as unused:
        unused.bind(("", 0))
        return int(unused.getsockname()[1])
