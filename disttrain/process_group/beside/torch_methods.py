"""The methods of torch's groups that ours have, too, such as `group.allreduce([tensor])`; they return handles."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, Protocol

from disttrain.process_group.beside.torch_callers import check_caller, check_shower, check_taker

NAMES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "allgather_coalesced", "gather"),
    *("scatter", "reduce_scatter", "alltoall", "alltoall_base", "barrier", "monitored_barrier"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("all_to_all_single", "send", "recv", "recv_anysource", "_allgather_base", "_reduce_scatter_base"),
    *("_start_coalescing", "_end_coalescing", "get_group_store", "getGroupName", "_set_group_name"),
    *("group_desc", "getGroupDesc", "_set_group_desc", "_device_types", "_get_backend"),
)


def add_torch_methods(group_class: type[object]) -> None:
    """Name by name: a class with `__getattr__` takes three times as long for each attribute, at each collective."""
    for name in NAMES:
        setattr(group_class, name, property(partial(_method, name=name)))
    for name, method in (("__str__", _text), ("__bool__", _is_true), ("__iter__", _refused_iteration)):
        setattr(group_class, name, method)


class _Callable(Protocol):
    callable: Any
    """`ProcessGroup.callable`."""


def _text(group: object) -> str:
    check_shower("group")
    return repr(group)


def _is_true(group: object) -> bool:
    check_taker()
    return True


def _refused_iteration(group: object) -> NoReturn:
    """For torch, which takes what is none of its groups for a list of groups."""
    check_caller("group")
    raise TypeError(f"{type(group).__name__!r} object is not iterable")


def _method(group: _Callable, name: str) -> Any:
    if group.callable is None:
        # Here: what torch calls stands above groups, and groups above this.
        from disttrain.process_group.beside.torch_group import TorchGroup
        from disttrain.process_group.group import ProcessGroup  # likewise

        assert isinstance(group, ProcessGroup)
        group.callable = TorchGroup(group, None)
    return getattr(group.callable, name)
