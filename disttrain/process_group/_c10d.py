"""The only file that uses torch's transports: its C++ Gloo and NCCL groups, driven through a disttrain store.

Only this file names what torch keeps private about process groups (`torch._C._distributed_c10d`). The groups are used
as bare transports. torch's registry of process groups hears of those that are to be known there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, cast

import torch
from torch._C import _distributed_c10d as c10d
from torch._library.effects import EffectType
from torch.distributed import DistStoreError, distributed_c10d

from disttrain.errors import ArgumentError, StoreTimeoutError
from disttrain.ranks import Positions, Ranks
from disttrain.store import Store
from disttrain.store.slices import in_slices

ReduceOp = c10d.ReduceOp
Reduction = ReduceOp | ReduceOp.RedOpType
"""An operation as `ReduceOp.SUM` gives it, or an object of ReduceOp that wraps it."""
AllToAllOptions = c10d.AllToAllOptions
AllgatherOptions = c10d.AllgatherOptions
AllreduceCoalescedOptions = c10d.AllreduceCoalescedOptions
AllreduceOptions = c10d.AllreduceOptions
BarrierOptions = c10d.BarrierOptions
BroadcastOptions = c10d.BroadcastOptions
GatherOptions = c10d.GatherOptions
ReduceOptions = c10d.ReduceOptions
ReduceScatterOptions = c10d.ReduceScatterOptions
ScatterOptions = c10d.ScatterOptions

TorchTCPStore = c10d.TCPStore
DebugLevel: Any = c10d.DebugLevel
BuiltinCommHookType: Any = c10d.BuiltinCommHookType
GradBucket = c10d.GradBucket

Transport = Any
"""A `c10d::Backend`: torch's stubs don't describe the methods that all of them share."""


class StoreAdapter(c10d.Store):
    """A disttrain store as the C++ transports see one. They call it from threads of their own.

    Keep it for as long as the transport: C++ holds the C++ half alone, and without the Python half no method is found.
    """

    def __init__(self, store: Store, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises once there is no reason to wait any longer."""
        super().__init__()
        self._store = store
        self._check = check

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = in_slices(
            [key], lambda slice_s: self._store.watch(key, None, slice_s), self._store.timeout_s, self._check
        )
        assert value is not None
        return value

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def append(self, key: str, value: bytes | str) -> None:
        self._store.append(key, value)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._store.timeout_s if timeout is None else timeout.total_seconds()
        in_slices(keys, lambda slice_s: self._store.wait(keys, slice_s), timeout_s, self._check)

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


def make_gloo(
    store: StoreAdapter, rank: int, size: int, timeout_s: float, hostname: str | None, interfaces: Sequence[str]
) -> Transport:
    """A Gloo mesh among `size` processes. Collective: blocks until all of them are connected.

    It listens on each of the `interfaces`; without any, where `hostname` leads, or else the name of this host.
    Raises: RuntimeError when an interface has no address.
    """
    gloo: Any = c10d.ProcessGroupGloo  # the stubs leave out the options that its constructor takes
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    if interfaces:
        options._devices = [gloo.create_device(interface=interface) for interface in interfaces]
    else:
        options._devices = [gloo.create_default_device() if hostname is None else gloo.create_device(hostname=hostname)]
    return gloo(store, rank, size, options)


def keep_for_good(transport: Transport) -> None:
    """Never let its destructor run, not even when the interpreter ends and takes modules apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport))


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


class TimesOutAsTorchs(StoreAdapter):
    """For torch's own Python code, which catches RuntimeError while it waits for slow ranks."""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        try:
            super().wait(keys, timeout)
        except StoreTimeoutError as error:
            raise DistStoreError(str(error)) from error


TorchProcessGroup: Any = c10d.ProcessGroup
"""The class of torch's groups, for those of ours that torch is to know."""


def plain_group(store: TimesOutAsTorchs, rank: int, size: int, transports: Mapping[str, tuple[str, Transport]]) -> Any:
    """A process group of torch's on transports that are there already: names ("gloo", "nccl") and C++ halves, by device
    type."""
    bindings: Any = c10d  # the stubs tell names of groups from other str
    group = bindings.ProcessGroup(store, rank, size)
    for device_type, (name, transport) in transports.items():
        register_transport(group, device_type, name, transport)
    return group


def register_transport(group: Any, device_type: str, name: str, transport: Transport) -> None:
    """Let the C++ half of `group` know what it has for tensors on `device_type`."""
    c10d.ProcessGroup._register_backend(group, torch.device(device_type), _kind(name), transport)


def _kind(name: str) -> Any:
    return getattr(c10d.ProcessGroup.BackendType, name.upper())


class TorchRegistration:
    """A process group that torch.distributed knows, as its own init_process_group and new_group would make them known.

    torch has no public way: its maps are filled as these do. `backends` are names, by device type.
    """

    def __init__(
        self,
        group: Any,
        name: str,
        ranks: Ranks,
        store: TimesOutAsTorchs,
        backends: Mapping[str, str],
        is_default: bool,
    ) -> None:
        self.group = group
        self._store = store
        self._name = name
        self._replaced: Any = None
        self._replacement: Any = None
        kinds = dict.fromkeys(backends.values())
        group._set_default_backend(_kind("nccl" if "nccl" in kinds else "gloo"))
        group._set_group_name(name)
        group._set_group_desc("default_pg" if is_default else "undefined")
        config = ",".join(f"{device_type}:{kind}" for device_type, kind in backends.items())
        world: Any = distributed_c10d._world
        world.pg_map[group] = (config if len(kinds) > 1 else next(iter(kinds)), store)
        world.pg_names[group] = name
        world.pg_backend_config[group] = config
        world.pg_group_ranks[group] = Positions(ranks)
        world.pg_to_tag[group] = ""
        world.tags_to_pg.setdefault("", []).append(group)
        bindings: Any = c10d
        bindings._register_process_group(name, group)
        if is_default:
            distributed_c10d._update_default_pg(group)

    def give_way(self, gone: Callable[[], None]) -> None:
        """Let a script that initialises torch.distributed itself do so, as if this had not been; `gone` is told.

        torch would refuse, but then a job could not use both as it could before torch was told of ours. With groups
        that torch has made from this one, it does refuse.
        """
        original = distributed_c10d.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if len(distributed_c10d._world.pg_map) == 1:
                self._forget()
                gone()
            original(*args, **kwargs)

        self._replaced, self._replacement = original, init_process_group
        _set_init(init_process_group)

    def _forget(self) -> None:
        """As destroying would, but for the transports, which stay."""
        self._restore()
        world: Any = distributed_c10d._world
        for of_group in (world.pg_map, world.pg_names, world.pg_to_tag):
            of_group.pop(self.group, None)
        world.pg_group_ranks.clear()  # also of groups of ours, which it alone made known
        world.pg_backend_config.clear()
        world.tags_to_pg[""].remove(self.group)
        bindings: Any = c10d
        bindings._unregister_process_group(self._name)
        distributed_c10d._update_default_pg(None)

    def _restore(self) -> None:
        if self._replacement is not None and distributed_c10d.init_process_group is self._replacement:
            _set_init(self._replaced)
        self._replacement = None

    def undo(self) -> None:
        """Make torch forget the group; the default one with all groups that torch made from it."""
        self._restore()
        if self.group in distributed_c10d._world.pg_map:
            torch.distributed.destroy_process_group(self.group)


def tell_ranks(group: Any, ranks: Ranks, backend: str) -> None:
    """Let torch's functions in Python translate ranks for a group of ours, and know its backend."""
    torch_world: Any = distributed_c10d._world
    torch_world.pg_group_ranks[group], torch_world.pg_backend_config[group] = Positions(ranks), backend


def forget_ranks(group: Any) -> None:
    distributed_c10d._world.pg_group_ranks.pop(group, None)
    distributed_c10d._world.pg_backend_config.pop(group, None)


def _set_init(function: Any) -> None:
    """Under both names that scripts call."""
    for module in (distributed_c10d, torch.distributed):
        setattr(module, "init_process_group", function)  # noqa: B010  mypy knows no assignment to it


class SharedMemory:
    """So many bytes of GPU memory on each rank of a group, which all its ranks can address. Collective to make.

    torch makes it over a group that its registry knows; this one knows no transports, and is there for that alone.
    """

    def __init__(self, name: str, rank: int, size: int, store: Store, num_bytes: int, device: torch.device) -> None:
        bindings: Any = c10d
        self._store = StoreAdapter(store)
        self._group: Any = bindings.ProcessGroup(self._store, rank, size)
        self._group._set_group_name(name)
        bindings._register_process_group(name, self._group)
        try:
            symmetric = bindings._SymmetricMemory
            self._memory = symmetric.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
            self._handle = symmetric.rendezvous(self._memory)
        finally:
            bindings._unregister_process_group(name)

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int) -> torch.Tensor:
        """A tensor in the memory of group rank `rank`."""
        tensor: torch.Tensor = self._handle.get_buffer(rank, tuple(shape), dtype, offset_bytes // dtype.itemsize)
        return tensor

    def barrier(self, timeout_s: float) -> None:
        """Let the current stream go on when all ranks' streams have come here. A rank that waits longer than
        `timeout_s` fails, as a faulty kernel does."""
        self._handle.barrier(channel=0, timeout_ms=int(timeout_s * 1000))


def store_of_torch() -> Any:
    """The store of torch's default group."""
    return distributed_c10d._get_default_store()


def transport_of(group: Any, device_type: str) -> Transport:
    """The C++ half that torch's `group` uses for a device type."""
    return group._get_backend(torch.device(device_type))


def copy_to_all(outputs: Sequence[torch.Tensor], input: torch.Tensor) -> None:
    """Copy `input` to each of `outputs`, which have its shape, in one call."""
    if outputs:
        torch._foreach_copy_([*outputs], [input] * len(outputs))


def wrapping(kind: type[torch.Tensor], inner: torch.Tensor) -> Any:
    """A tensor of class `kind` that looks like the contiguous `inner` and has no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(kind, inner.shape, dtype=inner.dtype, device=inner.device)


def keep_in_order(operator_name: str) -> None:
    """Let compilers run all calls of such operators in the order of the program, also those whose result is unused."""
    torch.library._register_effectful_op(operator_name, EffectType.ORDERED)


def is_traced() -> bool:
    """True while Dynamo, make_fx or fake tensors record operators instead of running them."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def recorder() -> Any:
    """The tracer that records operators as a graph now, one object for each graph; None while none does."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer


def is_in_backward() -> bool:
    """True while the autograd engine is at work in this thread."""
    return torch._C._current_autograd_node() is not None


without_torch_function: Any = torch._C._disabled_torch_function_impl
"""As a class's `__torch_function__`: `__torch_dispatch__` alone handles its tensors."""


def premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """The reduction that multiplies each rank's values by its own `factor` and adds them up.

    For floating point and complex tensors. `factor` is a number, or a tensor of one element on the tensors' device.
    """
    make: Any = c10d._make_nccl_premul_sum  # the stubs leave it out
    if (isinstance(factor, torch.Tensor) and factor.numel() != 1) or not isinstance(factor, torch.Tensor | float | int):
        raise ArgumentError("premul_sum", f"factor={factor!r} is no number.", "Give one, or a tensor of one element.")
    return cast(ReduceOp, make(factor if isinstance(factor, torch.Tensor) else float(factor)))


def reduction_kind(op: Reduction) -> ReduceOp.RedOpType:
    """The kind of a ReduceOp, which may be given as its kind already. Raises TypeError for anything else."""
    if isinstance(op, ReduceOp.RedOpType):
        return op
    whole: Any = op
    if not isinstance(whole, ReduceOp):
        raise TypeError(f"{op!r} is no ReduceOp")
    return cast(ReduceOp.RedOpType, cast(Any, op).op)


_SUM: Final = ReduceOp.SUM
# By identity: torch's enumerators live as long as their class, and take a microsecond to hash or to name.
_NAMES: Final = {id(kind): name for name, kind in ReduceOp.RedOpType.__members__.items() if name != "SUM"}


def reduction_name(op: Reduction) -> str | None:
    """Such as `MAX`; None for a sum, which most are."""
    if op is _SUM:
        return None
    name = _NAMES.get(id(op))
    if name is None:
        name = reduction_kind(op).name
    return None if name == "SUM" else name


def reduction_factor(op: Reduction) -> Any:
    """The factor that `premul_sum` was given."""
    reduction: Any = op
    # Before torch 2.12 only what is to be pickled has it.
    return reduction.factor if hasattr(reduction, "factor") else reduction.__getstate__()[1]


def nccl_is_available() -> bool:
    """True in a CUDA build of torch on a machine with a GPU."""
    return hasattr(c10d, "ProcessGroupNCCL") and torch.cuda.is_available()


def gloo_is_available() -> bool:
    return hasattr(c10d, "ProcessGroupGloo")
