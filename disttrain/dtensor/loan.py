"""Views that move: results that would share memory with their operand, had it not been cut where they look.

A view of a cut dim's element, or one that needs the whole, computes on a copy of what it needs. The copy is a loan: it
is fetched again once the operand has been written to, and what is written to it goes back into the operand's part. So
it reads and writes as a view does. The loan hangs on the result's spec, which is therefore no other tensor's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Fetch:
    """How to get what a view needs from this rank's part, and how to put it back. Collective over the mesh, both.

    `read` takes the part and returns memory of its own; `write` takes what `read` returned, and the part to write to.
    """

    read: Callable[[torch.Tensor], torch.Tensor]
    write: Callable[[torch.Tensor, torch.Tensor], None]


def _copy(part: torch.Tensor) -> torch.Tensor:
    return part.clone(memory_format=torch.contiguous_format)


def _copy_back(moved: torch.Tensor, part: torch.Tensor) -> None:
    part.copy_(moved)


AS_CONTIGUOUS = Fetch(_copy, _copy_back)
"""For a part whose strides do not allow the view that the whole's strides allow."""


class Loan:
    """The operand's values where a view needs them, kept equal to the operand's on every use."""

    def __init__(self, owner: Any, fetch: Fetch) -> None:
        """`owner` is the DTensor that is viewed."""
        self.moved = fetch.read(owner._local_tensor)
        self.parent: Loan | None = None
        """The loan that the owner itself is on."""
        self._owner = owner
        self._part: torch.Tensor = owner._local_tensor
        self._fetch = fetch
        self._version = _version_of(owner)

    @property
    def root(self) -> torch.Tensor:
        """The part that writes reach in the end."""
        return self._part if self.parent is None else self.parent.root

    def refresh(self) -> None:
        """Fetch again what has changed. Collective: writes are seen by all ranks alike."""
        if self.parent is not None:
            self.parent.refresh()
        version = _version_of(self._owner)
        if version is None or version != self._version:
            self.moved.copy_(self._fetch.read(self._part))
            self._version = version

    def settle(self) -> None:
        """Put back what has been written. Collective."""
        self._fetch.write(self.moved, self._part)
        if self.parent is not None:
            self.parent.settle()


def _version_of(owner: torch.Tensor) -> int | None:
    """How often the owner, or any view of it, has been written to; None where torch does not count."""
    return None if owner.is_inference() else owner._version
