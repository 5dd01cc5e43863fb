"""Meeting under torchrun, whose agent already runs torch's own store at MASTER_ADDR:MASTER_PORT.

Rank 0 starts our store on a free port and leaves its address, with a token made for it, in torch's store. The agent's
store need not be on rank 0's node, so rank 0 says where it is itself.
"""

from __future__ import annotations

import contextlib
import json
import socket
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed import TCPStore as TorchStore

from disttrain.errors import RendezvousError
from disttrain.settings import TOKEN_FILE, TORCHELASTIC_RESTART_COUNT
from disttrain.store import TCPStore, new_token, read_token


def open_store(host: str, port: int, rank: int, name: str, timeout_s: float) -> TCPStore:
    """The store of this attempt's world `name`; rank 0 starts it.

    Raises: RendezvousError when torch's store, or rank 0, does not answer within `timeout_s`; StoreError.
    """
    timeout = timedelta(seconds=timeout_s)
    # torchrun starts workers again after a failure; a store of the attempt before is gone.
    key = f"disttrain/{TORCHELASTIC_RESTART_COUNT.read()}/{name}"
    try:
        agents = TorchStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        if rank == 0:
            store, told = _start(_own_address(host, port), timeout_s)
            agents.set(key, told)
            return store
        told = agents.get(key).decode()
    except DistError as error:
        raise RendezvousError(
            "init_process_group",
            f"torchrun's store at {host}:{port} did not say where rank 0 is within {timeout_s:g} s ({error}).",
            "Look at rank 0's error first; it starts the store.",
            rank=rank,
        ) from error
    place = json.loads(told)
    return TCPStore(
        place["host"], place["port"], timeout=timeout, wait_for_workers=False, token=place["token"] or _job_token()
    )


def _start(host: str, timeout_s: float) -> tuple[TCPStore, str]:
    """Our store on a free port, and what the others must know. A job's own token is known to all, and stays unsaid."""
    token = _job_token()
    told = None if token else new_token()
    store = TCPStore(host, 0, is_master=True, timeout=timeout_s, wait_for_workers=False, token=token or told)
    return store, json.dumps({"host": host, "port": store.port, "token": told})


def _job_token() -> str | None:
    path = TOKEN_FILE.read()
    return None if path is None else read_token(path)


def _own_address(host: str, port: int) -> str:
    """The address of this node that packets to `host` leave from, which its other clients can reach too."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
