"""Tells the other ranks, which wait, of an error that one rank raises before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from disttrain.process_group import ProcessGroup

AGREES_BY = "all_gather_into_tensor"
"""The operation with which the first step begins."""


@contextmanager
def refusing(group: ProcessGroup, operation: str) -> Iterator[None]:
    """An error raised within ends the other ranks' first step, unless this rank comes there after all."""
    try:
        yield
    except Exception as error:
        group.refuse(operation, error, AGREES_BY)
        raise
