"""No garbage collections while a state is taken apart: they would look at all of torch's objects, again and again.

Names, boxes and chunks by the ten thousand set them off, and none of these is garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within the block nothing is collected that only cycles keep."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
