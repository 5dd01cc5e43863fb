"""Prevents garbage collections while they would cost too much.

Taking a state apart creates names, boxes and chunks by the ten thousand, which trigger collections, and each collection
visits all of torch's objects. In a thread that writes a dump, a collection may free memory of a GPU. It then waits,
with the interpreter's lock held, for another thread that holds the GPU's allocator while it waits for a kernel that
does not end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps the garbage collector from collecting cycles within the block."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
