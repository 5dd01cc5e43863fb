"""Rendezvous of the ranks of a job: finds their store, and checks that all of them belong together.

`find_rendezvous` is pure but for the environment. `join` lets no rank wait for one that has failed: the first
contradiction becomes the verdict that every rank reads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from disttrain import settings
from disttrain.errors import RendezvousError, StoreConnectionError, StoreTimeoutError
from disttrain.process_group.joining import alone, beside_torch
from disttrain.settings import Setting
from disttrain.store import FileStore, PrefixStore, Store, TCPStore, read_token
from disttrain.store.attendance import absent, once
from disttrain.store.base import checked_store
from disttrain.store.protocol.wire import Address
from disttrain.store.rank_runs import in_words
from disttrain.version import __version__

T = TypeVar("T")
_LEAST_S = 0.1
_OPERATION = "init_process_group"
_ALL_CAME = "ok"


@dataclass(frozen=True)
class RendezvousInfo:
    """A rank of a job and where its store is. `host` is empty for a store that the caller brought."""

    rank: int
    world_size: int
    host: str = ""
    port: int = 0
    path: str = ""
    """The file that is the store, for ranks that share a file system; then there is no host."""
    is_alone: bool = False
    """True for the only rank of a process that nobody launched: its store is a file of its own."""
    hosts_store: bool = False
    """True when this rank starts the store's server."""
    under_torchrun: bool = False
    """True when `host` and `port` are those of torchrun's store, which tells where ours is."""
    standby: Address | None = None
    """The address of the store if it is no longer at `host`."""
    round: int = 0
    """The number of this start of the job among those that a launcher made in one store."""

    @property
    def address(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def find_rendezvous(
    init_method: str | None,
    rank: int,
    world_size: int,
    store: Store | None,
    environ: Mapping[str, str] | None = None,
) -> RendezvousInfo:
    """This rank and its job's store, from the arguments of init_process_group and the environment.

    Where neither says anything, the process is the one rank of a job of its own.
    """
    if store is not None:
        if init_method is not None:
            raise RendezvousError(_OPERATION, f"both store and init_method={init_method!r} are given.", "Give one.")
        checked_store(_OPERATION, store)
        return _checked(RendezvousInfo(rank, world_size))
    if init_method in (None, "env://") and alone.is_alone(rank, world_size, environ):
        return RendezvousInfo(0, 1, is_alone=True)
    return rendezvous_at(init_method or "env://", rank, world_size, environ)


def rendezvous_at(
    url: str, rank: int, world_size: int, environ: Mapping[str, str] | None = None, operation: str = _OPERATION
) -> RendezvousInfo:
    """This rank and its job's store, from a URL, whose query may name `rank` and `world_size`."""
    method = urlsplit(url)
    query = {key: values[0] for key, values in parse_qs(method.query).items()}
    rank, world_size = (
        _from_query(operation, url, query, "rank", rank),
        _from_query(operation, url, query, "world_size", world_size),
    )
    if method.scheme == "env":
        return _rendezvous_from_environment(rank, world_size, environ)
    if method.scheme == "tcp":
        if method.hostname is None or method.port is None:
            missing = "host name" if method.hostname is None else "port number"
            raise RendezvousError(operation, f"{url!r}: {missing} missing.", "Write tcp://host:port.")
        return _checked(
            RendezvousInfo(rank, world_size, method.hostname, method.port, hosts_store=rank == 0), operation
        )
    if method.scheme == "file":
        if method.netloc or not method.path.strip("/"):
            raise RendezvousError(operation, f"{url!r}: path missing.", "Write file:///absolute/path, with 3 slashes.")
        return _checked(RendezvousInfo(rank, world_size, path=method.path), operation)
    raise RendezvousError(
        operation,
        f"{url!r} is unknown. No rendezvous handler is for {method.scheme}://.",
        "Use env://, tcp://host:port, file:///path, or give a store.",
    )


def _from_query(operation: str, url: str, query: Mapping[str, str], name: str, default: int) -> int:
    """The number that the URL's query gives to `name`, else `default`."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise RendezvousError(operation, f"{url!r}: {name} is {text!r}, which is no number.", "Mend the URL.")
    return int(text)


def rendezvous_alone(rank: int, world_size: int) -> RendezvousInfo:
    """This rank of a job whose other ranks are played: the first, unless `rank` or RANK says otherwise."""
    named_rank = settings.RANK.read() if rank < 0 else rank
    size = _needed(settings.WORLD_SIZE, None) if world_size < 0 else world_size
    return _checked(RendezvousInfo(named_rank or 0, size))


def _rendezvous_from_environment(rank: int, world_size: int, environ: Mapping[str, str] | None) -> RendezvousInfo:
    store_address = settings.STORE.read(environ)
    needed: list[Setting[Any]] = [settings.RANK] * (rank < 0) + [settings.WORLD_SIZE] * (world_size < 0)
    _check_set(needed + [settings.MASTER_ADDR, settings.MASTER_PORT] * (store_address is None), environ)
    rank = _needed(settings.RANK, environ) if rank < 0 else rank
    world_size = _needed(settings.WORLD_SIZE, environ) if world_size < 0 else world_size
    if store_address is not None:
        address, comma, standby = store_address.partition(",")
        host, port = _endpoint(address)
        return _checked(
            RendezvousInfo(
                rank,
                world_size,
                host,
                port,
                standby=_endpoint(standby) if comma else None,
                round=settings.ROUND.read(environ),
            )
        )
    host, port_number = _needed(settings.MASTER_ADDR, environ), _needed(settings.MASTER_PORT, environ)
    if settings.TORCHELASTIC_USE_AGENT_STORE.read(environ):
        return _checked(RendezvousInfo(rank, world_size, host, port_number, under_torchrun=True))
    return _checked(RendezvousInfo(rank, world_size, host, port_number, hosts_store=rank == 0))


def _endpoint(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise RendezvousError(_OPERATION, f"{settings.STORE.name}: {text!r} is not host:port.", "Unset it, or mend it.")
    # The brackets around an address of IPv6 keep it from its port; they are no part of it.
    is_bracketed = host.startswith("[") and host.endswith("]")
    return host[1:-1] if is_bracketed else host, int(port)


def _needed(setting: Setting[T | None], environ: Mapping[str, str] | None) -> T:
    _check_set([setting], environ)
    value = setting.read(environ)
    assert value is not None
    return value


def _check_set(needed: Sequence[Setting[Any]], environ: Mapping[str, str] | None) -> None:
    """Raises RendezvousError with all variables that are missing, and those that are there and ask for them."""
    missing = [setting.name for setting in needed if not setting.is_set(environ)]
    if not missing:
        return
    present = [setting.name for setting in alone.OF_A_JOB if setting.is_set(environ)]
    besides = f", but {' and '.join(present)} {'is' if len(present) == 1 else 'are'}" if present else ""
    problem = f"in the environment {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set{besides}."
    remedy = "Start the script with disttrain-launch, or give rank, world_size and init_method='tcp://host:port'."
    unset = f" For one process by itself, unset {' and '.join(present)}." if present else ""
    raise RendezvousError(_OPERATION, problem, remedy + unset)


def _checked(info: RendezvousInfo, operation: str = _OPERATION) -> RendezvousInfo:
    if info.world_size < 1 or not 0 <= info.rank < info.world_size:
        missing = [name for name, value in (("rank", info.rank), ("size", info.world_size)) if value == -1]
        raise RendezvousError(
            operation,
            f"rank {info.rank} of world size {info.world_size} cannot be: "
            + (f"{missing[0]} parameter missing." if missing else "ranks run from 0 to world_size - 1."),
            "Give both rank and world_size.",
        )
    return info


def meet(info: RendezvousInfo, prefix: str, timeout_s: float) -> Store:
    """Connect to the job's store, which rank 0 starts where no launcher did, and `join` under `prefix`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline_s - time.monotonic(), _LEAST_S)
        store = open_store(info, prefix, left_s)
        try:
            join(PrefixStore(prefix, store), info, left_s)
        except StoreConnectionError:
            store.close()
            # It may have been the store of an earlier world, at the same address, in its last moments.
            if info.hosts_store or time.monotonic() > deadline_s:
                raise
        except BaseException:
            store.close()
            raise
        else:
            return store


def open_store(info: RendezvousInfo, prefix: str, timeout_s: float, *, multi_tenant: bool = False) -> Store:
    """Connect to the store at `info`; rank 0 starts it where no launcher did, or joins it (`multi_tenant`)."""
    if info.is_alone:
        return alone.open_own(timeout_s)
    if info.path:
        return FileStore(info.path, info.world_size, timeout_s)
    if info.under_torchrun:
        return beside_torch.open_under_torchrun(info.host, info.port, info.rank, prefix, timeout_s)
    token_file = settings.TOKEN_FILE.read()
    return TCPStore(
        info.host,
        info.port,
        world_size=info.world_size,
        is_master=info.hosts_store,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        token=None if token_file is None else read_token(token_file),
        standby=info.standby,
    )


def join(store: Store, info: RendezvousInfo, timeout_s: float) -> None:
    """Return once every rank of the job is here and all agree on its size.

    Raises: RendezvousError, on every rank that has come, when two ranks differ in world size or version, when one rank
    is taken twice, or when ranks don't come within `timeout_s`.
    """
    terms = json.dumps({"world_size": info.world_size, "disttrain": __version__}, sort_keys=True)
    agreed = store.compare_set("join/terms", "", terms).decode()
    if agreed != terms:
        _fail(store, f"rank {info.rank} came with {terms}, others with {agreed}")
    elif store.add(f"join/rank/{info.rank}", 1) > 1:
        _fail(store, f"rank {info.rank} was taken twice")
    elif store.add("join/num_ranks", 1) == info.world_size:
        store.compare_set("join/verdict", "", _ALL_CAME)
    try:
        store.wait(["join/verdict"], timeout_s)
    except StoreTimeoutError:
        once(store, "join/verdict", lambda: _attendance(store, info.world_size, timeout_s))
    verdict = store.get("join/verdict").decode()
    if verdict != _ALL_CAME:
        raise RendezvousError(
            _OPERATION,
            f"{verdict}.",
            "Start every rank once, with one world size and version; give each world a store or group name of its own.",
            rank=info.rank,
        )


def _attendance(store: Store, world_size: int, timeout_s: float) -> str:
    """The verdict when the time is over: the last rank may have come just now."""
    ranks = absent(store, "join/rank/", range(world_size))
    return f"after {timeout_s:g} s ranks [{in_words(ranks)}] of {world_size} had not come" if ranks else _ALL_CAME


def _fail(store: Store, problem: str) -> None:
    """Make `problem` the verdict, unless there is one already."""
    store.compare_set("join/verdict", "", problem)
