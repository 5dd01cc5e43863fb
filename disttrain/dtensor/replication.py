"""`implicit_replication`: whether plain tensors may meet DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_IMPLICIT: ContextVar[bool] = ContextVar("is_implicit", default=False)


@contextmanager
def implicit_replication(enabled: bool = True) -> Iterator[None]:
    """Within it, a plain tensor that meets a DTensor is taken to be whole, and the same on every rank of its mesh.

    That it is the same is not checked. A backward that torch runs on a thread of its own does not see it.
    """
    token = _IS_IMPLICIT.set(enabled)
    try:
        yield
    finally:
        _IS_IMPLICIT.reset(token)


def is_replication_implicit() -> bool:
    return _IS_IMPLICIT.get()
