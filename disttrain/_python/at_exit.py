"""Functions that are called when this process ends, as by `atexit`, but not in children that are forked off it.

A child that ends by sys.exit would say goodbye for its parent, over sockets that both have.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any, Final

_REGISTERED: Final[list[Callable[[], Any]]] = []


def register(function: Callable[[], Any]) -> None:
    """Have `function` called when this process ends: those registered last come first."""
    _REGISTERED.append(function)
    atexit.register(function)


def unregister(function: Callable[[], Any]) -> None:
    """Have it not called any more; nothing happens where it would not have been."""
    if function in _REGISTERED:
        _REGISTERED.remove(function)
    atexit.unregister(function)


def _forget_all() -> None:
    for function in _REGISTERED:
        atexit.unregister(function)
    _REGISTERED.clear()


os.register_at_fork(after_in_child=_forget_all)
