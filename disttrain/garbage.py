"""No collections of garbage while they would cost too much.

Names, boxes and chunks by the ten thousand set them off while a state is taken apart, and each looks at all of torch's
objects. In a thread that writes a dump, one may come upon memory of a GPU, and wait, with the interpreter's lock held,
for another thread that holds its allocator while it waits for a kernel that does not end.
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
