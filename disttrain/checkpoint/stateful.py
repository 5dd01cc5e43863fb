"""Objects that may stand in a state besides tensors, values and dicts: with a state, with a value per rank, empty
slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state to a save and gets it back from a load.

    It gets back what it gave: also entries that `state_dict()` does not have at the time of the load. Tensors that
    `state_dict()` does have are loaded in place, as they lie on the mesh; others come whole, on the CPU.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state: a dict of tensors, plain values and dicts."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take the state on."""
        ...


@dataclass(frozen=True)
class Value:
    """A dict, or anything else without tensors, to be saved and loaded as one value, whatever its keys."""

    value: Any


@dataclass(frozen=True)
class PerRank:
    """A value that each rank has its own of. `rank` is whose it was.

    Loaded on more ranks than it was saved on, rank R gets the value of rank R modulo the number of saving ranks.
    """

    value: Any
    rank: int = 0


@dataclass(frozen=True)
class Unfilled:
    """A place whose state is not there yet: a save skips it, a load puts a dict of whatever was saved there.

    `make` gives an uninitialised tensor for each saved one, from its key, global shape and dtype.
    """

    make: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


def make_plain(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor on the CPU."""
    return torch.empty(shape, dtype=dtype)
