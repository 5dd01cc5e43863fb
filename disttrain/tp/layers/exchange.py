"""Exchanges that go on while this rank multiplies: by copy engines where GPUs reach each other, else by messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from disttrain.process_group import P2POp, ProcessGroup, Work, batch_isend_irecv, irecv, isend
from disttrain.process_group.peers.memory import add_up, copy_blocks, peer_memory_of

PAYS_FROM_BYTES = 4 << 20
"""A smaller message takes a GPU less time than the launches that sending it by itself needs."""


class TermSum(Protocol):
    """A sum of all ranks' terms for each rank, while it is made."""

    def send(self, target: int, term: torch.Tensor) -> None:
        """Begin to send a term of the sum of group rank `target`. To each once, nearest after this rank first."""
        ...

    def finish(self, term: torch.Tensor) -> torch.Tensor:
        """This rank's sum, with its own `term`, which may lie apart along its first dim."""
        ...


class Exchange(Protocol):
    """A way to exchange. All calls are collective."""

    def gather(self, part: torch.Tensor, parts: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Fill `parts` (ranks, *part.shape) with all ranks' contiguous tensors like `part`.

        Yields each rank with its part, when that may be used: this rank's first. All is there when the loop is over.
        """
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
    memory = peer_memory_of(group, device) if device.type == "cuda" else None
    return Messages(group, device) if memory is None and wished else memory


class Messages:
    """Each step of a ring is a message to one rank and one from another."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def gather(self, part: torch.Tensor, parts: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        rank, size = self._group.group_rank, self._group.group_size
        under_way = []
        for step in range(1, size):
            source, target = (rank + step) % size, (rank - step) % size
            received = torch.empty_like(part)
            under_way.append((source, received, _swap(self._group, part, target, received, source, step)))
        yield rank, part
        for source, received, works in under_way:
            _wait_for(works)
            yield source, received
            parts[source].copy_(received)
        copy_blocks(parts[rank], part)

    def sum(self, shape: Sequence[int], dtype: torch.dtype) -> TermSum:
        return _MessageSum(self._group, self._device, shape, dtype)


class _MessageSum:
    def __init__(self, group: ProcessGroup, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._group = group
        self._terms = torch.empty((group.group_size, *shape), dtype=dtype, device=device)
        self._works: list[Work] = []

    def send(self, target: int, term: torch.Tensor) -> None:
        rank, size = self._group.group_rank, self._group.group_size
        step = (target - rank) % size
        source = (rank - step) % size
        self._works += _swap(self._group, term.contiguous(), target, self._terms[source], source, step)

    def finish(self, term: torch.Tensor) -> torch.Tensor:
        _wait_for(self._works)
        total = torch.empty_like(self._terms[0])
        add_up(self._terms, self._group.group_rank, term, total)
        return total


def _swap(
    group: ProcessGroup, sent: torch.Tensor, target: int, received: torch.Tensor, source: int, step: int
) -> list[Work]:
    return batch_isend_irecv(
        [
            P2POp(isend, sent, group=group, group_peer=target, tag=step),
            P2POp(irecv, received, group=group, group_peer=source, tag=step),
        ]
    )


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
