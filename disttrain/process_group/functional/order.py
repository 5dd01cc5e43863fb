"""The order of collectives in a graph as a dependency of data: each is given the handle of the one before."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from disttrain.process_group._c10d import is_in_backward, recorder

_LAST: Final[WeakKeyDictionary[Any, dict[bool, torch.Tensor]]] = WeakKeyDictionary()
"""By who records a graph, and whether it is the backward part: the handle of the last collective."""


def start(op: Any, *arguments: Any) -> torch.Tensor:
    """The handle of `op`, a collective, after the one that was recorded last.

    Where Dynamo reads the program nothing is recorded yet, and where it runs nothing needs to be.
    """
    graph = None if torch.compiler.is_dynamo_compiling() else recorder()
    if graph is None:
        handle: torch.Tensor = op(*arguments)
        return handle
    last = _LAST.setdefault(graph, {})
    # A backward graph runs after the forward one anyhow, and should not keep its handles.
    is_backward = is_in_backward()
    handle = op(*arguments, after=last.get(is_backward))
    last[is_backward] = handle
    return handle
