"""The order of collectives in a graph as a dependency of data: each is given the handle of the one before."""

from __future__ import annotations

from collections.abc import Callable
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
    handle: torch.Tensor = _after_last(op, arguments, lambda result: result)
    return handle


def run(op: Any, *arguments: Any) -> list[torch.Tensor]:
    """The results of `op`, which begins and ends collectives by itself, in the same order; its first is its handle."""
    results: list[torch.Tensor] = _after_last(op, arguments, lambda results: results[0])
    return results[1:]


def _after_last(op: Any, arguments: tuple[Any, ...], handle_of: Callable[[Any], torch.Tensor]) -> Any:
    graph = None if torch.compiler.is_dynamo_compiling() else recorder()
    if graph is None:
        return op(*arguments)
    last = _LAST.setdefault(graph, {})
    # A backward graph runs after the forward one anyhow, and should not keep its handles.
    is_backward = is_in_backward()
    result = op(*arguments, after=last.get(is_backward))
    last[is_backward] = handle_of(result)
    return result
