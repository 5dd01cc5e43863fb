"""How scripts end that a warm Python (`warm_python`) forks: with all that is done at exit, and at a tenth of its price.

A script takes down what it made, and not what had been loaded before it: that touches each page of a fork's memory,
and so copies it, half a second for each script. What an interpreter does to itself after that takes a tenth of a
second, and is left out where the exit code is known.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NoReturn


class _Ending:
    exit_code: int | None = None
    """None: it is not known, or the script has not ended."""


_ending = _Ending()


def keep_what_is_loaded() -> None:
    """To be called when all is loaded: what is registered to be done at exit before anything else is done last."""
    atexit.register(_end, {name: module for name, module in sys.modules.items() if name != "__main__"})


@contextmanager
def noting_exit_code() -> Iterator[None]:
    """Around a script."""
    try:
        yield
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            _ending.exit_code = (ended.code or os.EX_OK) & 0xFF
        raise
    _ending.exit_code = os.EX_OK


def _end(loaded: dict[str, ModuleType]) -> None:
    if _ending.exit_code is not None:
        _end_at_once(_ending.exit_code, loaded)
    libc = ctypes.PyDLL(None)  # which lets no other thread in
    libc.on_exit(libc._exit, None)  # before what C++ has registered: it is called with the exit code
    libc.Py_IncRef(ctypes.py_object(loaded))
    own = {name: module for name, module in sys.modules.items() if name not in loaded or name in ("builtins", "sys")}
    sys.modules.clear()  # in one go: another thread must not load again what it misses
    sys.modules.update(own)


def _end_at_once(exit_code: int, loaded: dict[str, ModuleType]) -> NoReturn:
    """With what an interpreter does for the modules that came after these, which are the last ones."""
    sys.setswitchinterval(1e6)  # No other thread runs meanwhile.
    for name in tuple(itertools.takewhile(lambda name: name not in loaded, reversed(sys.modules))):
        module = sys.modules.pop(name)
        if isinstance(module, ModuleType):
            vars(module).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)
