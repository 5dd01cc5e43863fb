"""Rendezvous by a store of torch's that is there already: under torchrun, or in a job of torch.distributed.

Rank 0 starts our store on a free port and leaves its address, with a token made for it, in torch's store. torch's store
need not be on rank 0's node, so rank 0 says where it is itself.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from torch.distributed import DistError

from disttrain.errors import RendezvousError
from disttrain.process_group._c10d import TorchTCPStore
from disttrain.settings import MASTER_ADDR, TOKEN_FILE, TORCHELASTIC_RESTART_COUNT
from disttrain.store import TCPStore, new_token, read_token
from disttrain.store.connection.addresses import own_address


def open_under_torchrun(host: str, port: int, rank: int, name: str, timeout_s: float) -> TCPStore:
    """The store of this attempt's world `name`; torch's is at `host`:`port`.

    Raises: RendezvousError when torch's store, or rank 0, does not answer within `timeout_s`; StoreError.
    """
    # torchrun starts workers again after a failure; a store of the attempt before is gone.
    key = f"disttrain/{TORCHELASTIC_RESTART_COUNT.read()}/{name}"
    try:
        torch_store = TorchTCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        return open_beside(torch_store, host, rank, key, timeout_s)
    except DistError as error:
        raise RendezvousError(
            "init_process_group",
            f"torchrun's store at {host}:{port} did not say where rank 0 is within {timeout_s:g} s ({error}).",
            "Look at rank 0's error first; it starts the store.",
            rank=rank,
        ) from error


def open_beside(torch_store: Any, host: str, rank: int, key: str, timeout_s: float) -> TCPStore:
    """Our store, whose address rank 0 tells the others by `key` in `torch_store`; they all can reach `host`."""
    job_token = None if (token_file := TOKEN_FILE.read()) is None else read_token(token_file)
    if rank == 0:
        # A job's own token is known to all its ranks, and stays unsaid.
        told_token = None if job_token else new_token()
        address, token = own_address(host), job_token or told_token
        store = TCPStore(address, 0, is_master=True, timeout=timeout_s, wait_for_workers=False, token=token)
        torch_store.set(key, json.dumps({"host": address, "port": store.port, "token": told_token}))
        return store
    torch_store.wait([key], timedelta(seconds=timeout_s))
    endpoint = json.loads(torch_store.get(key))
    # torch's store believes everybody, so what it says must not take the place of a token that we have.
    token = job_token or endpoint["token"]
    return TCPStore(endpoint["host"], endpoint["port"], timeout=timeout_s, wait_for_workers=False, token=token)


def host_of(torch_store: Any) -> str:
    """A host that all ranks can reach: that of `torch_store`'s server, else MASTER_ADDR, else this node itself."""
    while hasattr(torch_store, "underlying_store"):
        torch_store = torch_store.underlying_store
    return getattr(torch_store, "host", None) or MASTER_ADDR.read() or "localhost"
