"""Keeps what sends rows to other ranks out of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from disttrain.process_group._torch import outside_graphs

Function = TypeVar("Function", bound=Callable[..., object])
REASON: Final = "experts' rows go to other ranks, by sizes that the host reads"


def out_of_graphs(function: Function) -> Function:
    """The function, at whose calls compiled graphs break; with `fullgraph=True` the compiler's error says why."""
    return outside_graphs(function, f"{REASON}: compile with fullgraph=False")
