"""Ranges by which traces of torch's profilers, and NVTX under `emit_nvtx`, name what this library does.

While no profiler runs, each place asks one function of torch's, and does nothing else. Names of collectives end with
the mesh axis in brackets; `parsed` reads it back, to tell whose time it was.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from torch.profiler import record_function

from disttrain.process_group._torch import profiler
from disttrain.process_group.interfaces import GroupLike

COLLECTIVE: Final = "collective"
MESSAGE: Final = "message"
WAIT: Final = "wait"
"""The host waits for a collective or a message, which it has gone on beside, or has called just now."""

_NAME: Final = re.compile(rf"({COLLECTIVE}|{MESSAGE}|{WAIT}) \S+ \[(.+)\]")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def range_name(kind: str, operation: str, group: GroupLike) -> str:
    """Such as `collective all_reduce [dp]`; a group without a mesh axis has its own name there."""
    return f"{kind} {operation} [{group.axis_name or group.group_name}]"


def parsed(name: str) -> tuple[str, str] | None:
    """The kind, and the mesh axis or group, of a name that `range_name` has made; None for any other."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])


def in_range(name: str, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`function`, which a trace shows under `name`."""

    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with record_function(name):
            return function(*args, **kwargs)

    return call


def shown_in_traces(kind: str, operation: str, group: GroupLike, run: Callable[..., Any]) -> Callable[..., ShownWork]:
    """A transport's `run`, shown in a trace, as are waits for what it starts."""
    start = in_range(range_name(kind, operation, group), run)
    return lambda *arguments: ShownWork(start(*arguments), range_name(WAIT, operation, group))


class ShownWork:
    """The handle of a transport that was called while a profiler ran: waits for it are shown.

    So `Work.wait` need not ask whether one runs.
    """

    __slots__ = ("_name", "_started")

    def __init__(self, started: Any, name: str) -> None:
        self._started = started
        self._name = name

    def wait(self, *timeout: Any) -> bool:
        with record_function(self._name):
            return bool(self._started.wait(*timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._started, name)


def named_in_traces(name: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a function that traces are to show under `name`."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with record_function(name):
                return function(*args, **kwargs)

        return call

    return decorate
