"""A job's store for programs that open one themselves, as torch's `rendezvous` does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from disttrain.errors import RendezvousError
from disttrain.process_group.joining.rendezvous import RendezvousInfo, open_store, rendezvous_at
from disttrain.settings import STORE
from disttrain.store import PrefixStore, Store
from disttrain.store.durations import seconds

_OPERATION = "rendezvous"
_TIMEOUT = timedelta(minutes=30)


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
    """The store at `url`, this process's rank and the number of ranks: once, from an iterator, as torch gives them.

    Args:   url  "env://", "tcp://host:port" or "file:///path"; `?rank=..&world_size=..` may say what is not given;
            kwargs  `timeout`, of connecting, and the store's; others of torch's change nothing here.
    Raises: RendezvousError for what says too little, or the same twice; StoreError when there is no store.

    Nobody waits for other ranks. Under a launcher it is the launcher's store, where these keys have a prefix.
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value != -1 and f"{name}=" in url.partition("?")[2]:
            problem = f"{url!r} has node-specific arguments, and {name} is given beside it."
            raise RendezvousError(_OPERATION, problem, "Say it once.")
    info = rendezvous_at(url, rank, world_size, operation=_OPERATION)
    is_launchers = url.startswith("env:") and (info.under_torchrun or STORE.read() is not None)
    return _met(info, seconds(_OPERATION, kwargs.get("timeout", _TIMEOUT)), is_launchers)


def _met(info: RendezvousInfo, timeout_s: float, is_launchers: bool) -> Iterator[tuple[Store, int, int]]:
    store = open_store(info, _OPERATION, timeout_s, multi_tenant=True)
    yield PrefixStore(_OPERATION, store) if is_launchers else store, info.rank, info.world_size
    raise RendezvousError(_OPERATION, "ranks meet once: the iterator has no second store.", "Call it again.")
