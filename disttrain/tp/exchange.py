"""Exchanges that go on while this rank multiplies: by copy engines where GPUs reach each other, else by messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from disttrain.process_group import P2POp, ProcessGroup, Work, batch_isend_irecv, irecv, isend
from disttrain.process_group.peer_memory import Wait, peer_memory_of

PAYS_FROM_BYTES = 4 << 20
"""A smaller message takes a GPU less time than the launches that sending it by itself needs."""


class TermSum(Protocol):
    """A sum of all ranks' terms for each rank, while it is made."""

    @property
    def own(self) -> torch.Tensor:
        """Where this rank's term of its own sum has to be written."""
        ...

    def send(self, target: int, term: torch.Tensor) -> None:
        """Begin to send a term of the sum of group rank `target`. To each once, nearest after this rank first."""
        ...

    def finish(self) -> torch.Tensor:
        """This rank's sum."""
        ...


class Exchange(Protocol):
    """A way to exchange. All calls are collective."""

    def gather(self, own: torch.Tensor, parts: torch.Tensor) -> Sequence[Wait]:
        """Begin to fill `parts` (ranks, *own.shape) with the other ranks' contiguous tensors like `own`; the own place
        is left alone. The [step]-th result waits for the part of the rank so many places after this one."""
        ...

    def sum(self, shape: Sequence[int], dtype: torch.dtype) -> TermSum:
        """Begin a sum of terms of this shape."""
        ...


def exchange_for(group: ProcessGroup, device: torch.device, wished: bool | None, part_bytes: int) -> Exchange | None:
    """The way to exchange parts of so many bytes under the multiplications, None where that is not to be.

    As wished; where nothing is said, only large parts and only by copy engines. All ranks know the same, and decide
    alike. Collective, where it is asked for the first time.
    """
    if group.group_size == 1 or wished is False:
        return None
    if wished is None and (device.type != "cuda" or part_bytes < PAYS_FROM_BYTES):
        return None
    found = peer_memory_of(group, device) if device.type == "cuda" else None
    return Messages(group, device) if found is None and wished else found


class Messages:
    """Each step of a ring is a message to one rank and one from another."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def gather(self, own: torch.Tensor, parts: torch.Tensor) -> Sequence[Wait]:
        rank, size = self._group.group_rank, self._group.group_size
        waits: list[Wait] = [lambda: None]
        for step in range(1, size):
            source, target = (rank + step) % size, (rank - step) % size
            came = torch.empty_like(own)
            works = _swap(self._group, own, target, came, source, step)
            waits.append(_waiting_for(works, (parts[source], came)))
        return waits

    def sum(self, shape: Sequence[int], dtype: torch.dtype) -> TermSum:
        return _MessageSum(self._group, self._device, shape, dtype)


class _MessageSum:
    def __init__(self, group: ProcessGroup, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._group = group
        self._terms = torch.empty((group.group_size, *shape), dtype=dtype, device=device)
        self._works: list[Work] = []

    @property
    def own(self) -> torch.Tensor:
        return self._terms[self._group.group_rank]

    def send(self, target: int, term: torch.Tensor) -> None:
        rank, size = self._group.group_rank, self._group.group_size
        step = (target - rank) % size
        source = (rank - step) % size
        self._works += _swap(self._group, term.contiguous(), target, self._terms[source], source, step)

    def finish(self) -> torch.Tensor:
        _waiting_for(self._works)()
        return self._terms.sum(0)


def _swap(
    group: ProcessGroup, sent: torch.Tensor, target: int, received: torch.Tensor, source: int, step: int
) -> list[Work]:
    return batch_isend_irecv(
        [
            P2POp(isend, sent, group=group, group_peer=target, tag=step),
            P2POp(irecv, received, group=group, group_peer=source, tag=step),
        ]
    )


def _waiting_for(works: Sequence[Work], copied: tuple[torch.Tensor, torch.Tensor] | None = None) -> Wait:
    def wait() -> None:
        for work in works:
            work.wait()
        if copied is not None:
            copied[0].copy_(copied[1])

    return wait
