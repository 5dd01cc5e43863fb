"""The address of the server that a proxy passes requests on to."""

from __future__ import annotations

from typing import NamedTuple

from disttrain.store.protocol.wire import Address


class UpstreamAddress(NamedTuple):
    """The server's host and port, its standby's, and how long connecting may take."""

    host: str
    port: int
    standby: Address | None = None
    timeout_s: float = 60.0
