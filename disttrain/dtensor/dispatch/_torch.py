"""The one door to what torch keeps private about kernels for the meta device: many are Python, and load Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, Final

import torch
from torch import _compile

_KEPT: Final = "__dynamo_disable"
"""The attribute of a function under which torch keeps the one that Dynamo does not trace."""
_HOMES: Final = ("torch._decomp", "torch._meta_registrations", "torch._prims", "torch._refs")


@cache
def call_without_dynamo() -> None:
    """Has torch's kernels in Python run as they are until somebody loads Dynamo; the first of them would load it, which
    takes a second, to get a form of itself that it does not trace."""
    if "torch._dynamo" in sys.modules:
        return
    for function in _functions():
        while function is not None:
            inner = getattr(function, "__wrapped__", None)
            if getattr(function, "__code__", None) is _DISABLED and not hasattr(inner, _KEPT):
                setattr(inner, _KEPT, _until_dynamo(inner))
            function = inner


def _functions() -> Iterator[Any]:
    """The functions of which torch's kernels in Python are made."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(_HOMES):
            yield from [value for value in vars(module).values() if isinstance(value, FunctionType)]
    decompositions: Any = torch._decomp
    for table in decompositions.global_decomposition_table.values():
        yield from table.values()


def _until_dynamo(function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if getattr(function, _KEPT, None) is call:
            delattr(function, _KEPT)  # so that torch makes its own at the next call
        return torch.compiler.disable(function)(*args, **kwargs)

    return call


def _sample() -> None: ...


_DISABLED: Final[Any] = getattr(_compile._disable_dynamo(_sample), "__code__", None)
"""The code of functions that load Dynamo when they are called."""
