"""Looks up hosts, and the addresses of this machine that others can reach."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final

UNIX: Final = "@"
"""A host that begins with it names a socket of this machine's kernel (unix(7), abstract); its port is 0."""


def is_unix(host: str) -> bool:
    """True for the address of a socket that only processes of this machine reach, without a network."""
    return host.startswith(UNIX)


def unix_path(host: str) -> str:
    """The address of such a socket as the kernel has it."""
    return "\0" + host.removeprefix(UNIX)


def lookup_name(host: str) -> str | bytes:
    """`host` as `getaddrinfo` shall have it: numeric addresses as bytes.

    A str goes through the codec of international host names, and the tables of it take as long to load as a tenth of
    all that a store's server does before it listens.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, host)
            return host.encode()
    return host


def own_address(host: str) -> str:
    """The address of this node that packets to `host` leave from, which others that reach `host` can reach too."""
    family, kind, protocol, _, address = socket.getaddrinfo(lookup_name(host), 1, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


LOOPBACK_REMEDY: Final = "Bring it up: `ip link set lo up`; a container has it unless it was started without a network."


def is_loopback_down(host: str) -> bool:
    """True where `host` is an address of the loopback interface, 127.0.0.1 or the like, and that is down."""
    if not host.startswith("127.") and host not in ("localhost", "::1"):
        return False
    try:
        own_address(host)
    except OSError as error:
        return error.errno == errno.ENETUNREACH
    return False


def outward_address() -> str:
    """The address of this node that packets to other networks leave from; its name's where there are none.

    The addresses asked for are those that are kept for documentation (RFC 5737, RFC 3849): no host has them.
    """
    for host in ("192.0.2.1", "2001:db8::1", socket.gethostname()):
        with contextlib.suppress(OSError):
            return own_address(host)
    return "127.0.0.1"
