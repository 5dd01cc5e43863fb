"""The one door to torch's transports: its C++ Gloo and NCCL groups, driven through a disttrain store.

Only this file names what torch keeps private about process groups (`torch._C._distributed_c10d`). The groups
are used as bare transports: torch's own registry of process groups never hears of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch._C import _distributed_c10d as c10d

from disttrain.store import Store

ReduceOp = c10d.ReduceOp
Reduction = ReduceOp | ReduceOp.RedOpType
"""An operation as `ReduceOp.SUM` gives it, or an object of ReduceOp that wraps it."""
AllToAllOptions = c10d.AllToAllOptions
AllgatherOptions = c10d.AllgatherOptions
AllreduceOptions = c10d.AllreduceOptions
BarrierOptions = c10d.BarrierOptions
BroadcastOptions = c10d.BroadcastOptions
GatherOptions = c10d.GatherOptions
ReduceOptions = c10d.ReduceOptions
ReduceScatterOptions = c10d.ReduceScatterOptions
ScatterOptions = c10d.ScatterOptions

Transport = Any
"""A `c10d::Backend`: torch's stubs don't describe the methods that all of them share."""


class StoreAdapter(c10d.Store):
    """A disttrain store as the C++ transports see one. They call it from threads of their own.

    Keep it for as long as the transport: C++ holds the C++ half alone, and without the Python half no method is found.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def append(self, key: str, value: bytes | str) -> None:
        self._store.append(key, value)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> StoreAdapter:
        # The store is safe to use from every thread, so a transport's own thread may share it.
        return self


def make_gloo(store: StoreAdapter, rank: int, size: int, timeout_s: float, hostname: str | None) -> Transport:
    """A Gloo mesh among `size` processes. Collective: blocks until all of them are connected.

    `hostname` names the interface to listen on; None leaves the choice to Gloo (GLOO_SOCKET_IFNAME, the host's name).
    """
    gloo: Any = c10d.ProcessGroupGloo  # the stubs leave out the options that its constructor takes
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    options._devices = [gloo.create_default_device() if hostname is None else gloo.create_device(hostname=hostname)]
    return gloo(store, rank, size, options)


def make_nccl(
    store: StoreAdapter, rank: int, size: int, timeout_s: float, ranks: Sequence[int], name: str
) -> Transport:
    """An NCCL communicator per CUDA device that is used, made by the first collective on it."""
    nccl: Any = c10d.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]  # absent from a CPU build
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    return nccl(store, rank, size, options)


def premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """The reduction that multiplies each rank's values by its own `factor` and adds them up.

    For floating point and complex tensors. `factor` is a number, or a tensor of one element on the tensors' device.
    """
    make: Any = c10d._make_nccl_premul_sum  # the stubs leave it out
    return cast(ReduceOp, make(factor))


def reduction_kind(op: Reduction) -> ReduceOp.RedOpType:
    """Which operation it is, however it was given."""
    return op if isinstance(op, ReduceOp.RedOpType) else cast(Any, op).op


def reduction_factor(op: Reduction) -> Any:
    """What `premul_sum` was given."""
    return cast(Any, op).factor


def nccl_is_available() -> bool:
    """True in a CUDA build of torch on a machine with a GPU."""
    return hasattr(c10d, "ProcessGroupNCCL") and torch.cuda.is_available()


def gloo_is_available() -> bool:
    return hasattr(c10d, "ProcessGroupGloo")
