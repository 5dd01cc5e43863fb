"""Views that move: results that would share memory with their operand, had it not been cut where they look.

A view of a cut dim's element, or one that needs the whole, computes on a copy of what it needs. The copy is tied to the
tensor: it is fetched again once the operand has been written to, and what is written to it goes back into the operand's
part. So it reads and writes as a view does. The tie is kept on the result's spec, which is therefore no other tensor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from disttrain.dtensor.views.data import num_writes
from disttrain.dtensor.views.overlaps import check_can_merge, overlaps_itself, write_changes


@dataclass(frozen=True)
class Fetch:
    """Gets the values that a view needs from this rank's part, and puts them back. Collective over the mesh, both.

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


class ViewCopy:
    """The operand's values where a view needs them, kept equal to the operand's on every use."""

    def __init__(self, owner: Any, fetch: Fetch) -> None:
        """`owner` is the DTensor that is viewed."""
        # What counts its versions must be kept by what can be written to in every mode.
        with torch.inference_mode(mode=owner.is_inference()):
            self.moved = fetch.read(owner._local_tensor)
        self._parent: ViewCopy | None = None
        """The link of the owner itself, if that is a view copy."""
        self.owner = owner
        self.counter = owner
        """The tensor whose counter counts the writes that are put back."""
        self._spec = owner._spec
        self._part: torch.Tensor = owner._local_tensor
        self._fetch = fetch
        self._version = _version_of(owner)
        self._before: torch.Tensor | None = None

    def pass_on(self, parent: ViewCopy) -> None:
        """Say that the part is of what `parent`, which is up to date, has moved.

        Both then go by the versions of the tensor that owns its memory: a call knows a view copy by a stand-in,
        which no later write counts on.
        """
        self._parent = parent
        self.owner, self.counter, self._version = parent.owner, parent.counter, parent._version

    def counted_by(self, counter: Any) -> ViewCopy:
        """The same for a tensor whose writes are counted by `counter`."""
        view_copy = copy(self)
        view_copy.counter = counter
        return view_copy

    def refresh(self) -> None:
        """Fetch again what has changed. Collective: writes are seen by all ranks alike."""
        if self._parent is not None:
            self._parent.refresh()
        version = _version_of(self.owner)
        if version is None or version != self._version:
            self.moved.copy_(self._fetch.read(self._part))
            self._version = version

    def begin(self) -> None:
        """To be called before a write to what has been moved."""
        if self._parent is not None:
            self._parent.begin()
        if overlaps_itself(self._spec.shape, self._spec.stride):
            check_can_merge(self._spec)
            self._before = self.moved.clone()

    def settle(self) -> None:
        """Put back what has been written. Collective."""
        self._put_back()
        count_writes([self.counter])

    def _put_back(self) -> None:
        if self._before is None:
            self._fetch.write(self.moved, self._part)
        else:
            # Alike where nothing is written to.
            new, old = _copy(self._part), _copy(self._part)
            self._fetch.write(self.moved, new)
            self._fetch.write(self._before, old)
            write_changes(new, old, self._part)
            self._before = None
        if self._parent is not None:
            self._parent._put_back()


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count a write to each, where torch does not: it knows nothing of what happens within a call."""
    increment_version(tensors)


def _version_of(owner: torch.Tensor) -> int | None:
    """The number of writes to the owner and its views; None where torch does not count."""
    return None if owner.is_inference() else num_writes(owner)
