"""Keeps what sends rows to other ranks out of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., object])
REASON: Final = "experts' rows go to other ranks, by sizes that the host reads"


def out_of_graphs(function: Function) -> Function:
    """The function, at whose calls compiled graphs break; with `fullgraph=True` the compiler's error says why."""
    return cast(Function, torch.compiler.disable(function, reason=f"{REASON}: compile with fullgraph=False"))
