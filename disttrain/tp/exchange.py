"""Exchanges that go on while this rank multiplies: by copy engines where GPUs reach each other, else by messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from disttrain.process_group import P2POp, Work, batch_isend_irecv, irecv, isend
from disttrain.process_group.peer_memory import Wait, peer_memory_of
from disttrain.tp.axis import Axis

PAYS_FROM_BYTES = 4 << 20
"""A smaller message takes a GPU less time than the launches that sending it by itself needs."""


class TermSum(Protocol):
    """A sum of all ranks' terms for each rank, while it is made."""

    @property
    def own(self) -> torch.Tensor:
        """Where this rank's term of its own sum has to be written."""
        ...

    def send(self, target: int, term: torch.Tensor) -> None:
        """Begin to send a contiguous term of the sum of group rank `target`. To each once, nearest after this first."""
        ...

    def finish(self) -> torch.Tensor:
        """This rank's sum."""
        ...


class Exchange(Protocol):
    """A way to exchange. All calls are collective."""

    def gather(self, own: torch.Tensor, parts: torch.Tensor) -> Sequence[Wait]:
        """Begin to fill `parts` (ranks, ...) with the other ranks' contiguous tensors like `own`; the own place is left
        alone. The [step]-th result waits for the part of the rank so many places after this one."""
        ...

    def sum(self, shape: Sequence[int], dtype: torch.dtype) -> TermSum:
        """Begin a sum of terms of this shape."""
        ...


def exchange_for(axis: Axis, wished: bool | None, part_numel: int, dtype: torch.dtype) -> Exchange | None:
    """The way to exchange parts of so many elements under the multiplications, None where that is not to be.

    As wished; where nothing is said, only large parts and only by copy engines. All ranks know the same, and decide
    alike. Collective, where it is asked for the first time.
    """
    if axis.size == 1 or wished is False:
        return None
    if wished is None and (axis.mesh.device_type != "cuda" or part_numel * dtype.itemsize < PAYS_FROM_BYTES):
        return None
    found = None
    if axis.mesh.device_type == "cuda":
        found = peer_memory_of(axis.group, axis.mesh.world.device)
    return Messages(axis) if found is None and wished else found


class Messages:
    """Each step of a ring is a message to one rank and one from another."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def gather(self, own: torch.Tensor, parts: torch.Tensor) -> Sequence[Wait]:
        axis = self._axis
        waits: list[Wait] = [lambda: None]
        for step in range(1, axis.size):
            source, target = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
            waits.append(_waiting_for(_swap(axis, own, target, parts[source], source, step)))
        return waits

    def sum(self, shape: Sequence[int], dtype: torch.dtype) -> TermSum:
        return _MessageSum(self._axis, shape, dtype)


class _MessageSum:
    def __init__(self, axis: Axis, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._axis = axis
        self._terms = torch.empty((axis.size, *shape), dtype=dtype, device=axis.mesh.world.device)
        self._works: list[Work] = []

    @property
    def own(self) -> torch.Tensor:
        return self._terms[self._axis.rank]

    def send(self, target: int, term: torch.Tensor) -> None:
        axis = self._axis
        step = (target - axis.rank) % axis.size
        source = (axis.rank - step) % axis.size
        self._works += _swap(axis, term, target, self._terms[source], source, step)

    def finish(self) -> torch.Tensor:
        _waiting_for(self._works)()
        return self._terms.sum(0)


def _swap(axis: Axis, sent: torch.Tensor, target: int, received: torch.Tensor, source: int, step: int) -> list[Work]:
    return batch_isend_irecv(
        [
            P2POp(isend, sent, group=axis.group, group_peer=target, tag=step),
            P2POp(irecv, received, group=axis.group, group_peer=source, tag=step),
        ]
    )


def _waiting_for(works: Sequence[Work]) -> Wait:
    def wait() -> None:
        for work in works:
            work.wait()

    return wait
