"""Names a store to another process, which opens it with a connection of its own."""

from __future__ import annotations

from typing import Any

from disttrain.errors import StoreError
from disttrain.store.base import Store
from disttrain.store.client import TCPStore
from disttrain.store.file import FileStore
from disttrain.store.prefix import PrefixStore
from disttrain.store.tls.certificates import Certificates


def store_to_plain(store: Store) -> list[Any]:
    """The arguments of `store_from_plain`, the token included: give them to processes of the job only.

    Raises StoreError for a store that lives in one process.
    """
    if isinstance(store, PrefixStore):
        return ["prefix", store.prefix, store_to_plain(store.underlying_store)]
    if isinstance(store, TCPStore):
        return ["tcp", *store.address()]
    if isinstance(store, FileStore):
        return ["file", store.path, store.timeout_s]
    raise StoreError(
        "store_to_plain",
        f"no other process can use a {type(store).__name__}.",
        "Give init_process_group a TCPStore or a FileStore, or let it open one.",
    )


def store_from_plain(plain: list[Any]) -> Store:
    """The same store, to be closed on its own. Raises StoreConnectionError and the like."""
    kind, *rest = plain
    if kind == "prefix":
        return PrefixStore(rest[0], store_from_plain(rest[1])).owning()
    if kind == "file":
        return FileStore(rest[0], timeout=rest[1])
    host, port, standby, timeout_s, token, certificates = rest
    return TCPStore(
        host,
        port,
        timeout=timeout_s,
        wait_for_workers=False,
        was_there=True,
        token=token,
        standby=None if standby is None else (standby[0], standby[1]),
        certificates=None if certificates is None else Certificates(*certificates),
    )
