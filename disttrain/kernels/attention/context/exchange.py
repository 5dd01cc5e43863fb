"""Sends keys and values to the ranks whose queries see them, and terms of their gradients back.

A message has the keys of some runs of positions and then their values, one tensor for both. In a ring, each step's
messages go under the computing of the step before; gathered, all that a rank needs comes in one all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from disttrain.kernels.attention.context.peers import KEYS, PeerSlots
from disttrain.process_group import P2POp, ProcessGroup, Work, all_to_all_single, batch_isend_irecv, irecv, isend

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, or terms of their gradients: (B, K, S, E) and (B, K, S, Ev)."""


Filler = Callable[[int, torch.Tensor], None]


class Sizes(NamedTuple):
    """The sizes that keys and values of a rank have in common with those of others."""

    batch_size: int
    num_heads: int
    key_dim: int
    value_dim: int

    def num_elements(self, ranges: Sequence[range]) -> int:
        """Of a message with these positions."""
        return sum(map(len, ranges)) * self.batch_size * self.num_heads * (self.key_dim + self.value_dim)

    def pair(self, message: torch.Tensor) -> Pair:
        """The keys and the values in a message: views."""
        width = self.batch_size * self.num_heads * (self.key_dim + self.value_dim)
        length = message.numel() // width if width else 0
        bound = self.batch_size * self.num_heads * length * self.key_dim
        shape = (self.batch_size, self.num_heads, length)
        return message[:bound].view(*shape, self.key_dim), message[bound:].view(*shape, self.value_dim)

    def fill(self, message: torch.Tensor, pair: Pair, slices: Sequence[slice]) -> None:
        """Writes these positions' keys and values into a message, in its dtype."""
        for target, source in zip(self.pair(message), pair, strict=True):
            _copy(target, source, slices)


def _copy(target: torch.Tensor, source: torch.Tensor, slices: Sequence[slice]) -> None:
    first = 0
    for taken in slices:
        size = taken.stop - taken.start
        target[:, :, first : first + size].copy_(source[:, :, taken])
        first += size


class UnderWay:
    """Messages that are being exchanged."""

    def __init__(
        self,
        works: Sequence[Work],
        coming: Mapping[int, torch.Tensor],
        held: Sequence[torch.Tensor],
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._works = works
        self._coming = coming
        self._finish = finish
        """Is called by all ranks, also where nothing comes."""
        self._held = held
        """Is read until all is sent."""

    def wait(self) -> Mapping[int, torch.Tensor]:
        """The messages, by the ranks of the group that have sent them."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._held = ()
        return self._coming


def start(
    group: ProcessGroup,
    outgoing: Sequence[tuple[int, int]],
    incoming: Sequence[tuple[int, int]],
    fill: Filler,
    like: torch.Tensor,
    *,
    is_together: bool,
    slots: PeerSlots | None = None,
    kind: int = KEYS,
) -> UnderWay:
    """Begins to exchange messages of these numbers of elements with ranks of the group.

    Args: fill  writes the message to a rank.  like  a tensor of its dtype, on its device.
          is_together  in one all-to-all, in which all ranks of the group take part; else one by one.
          slots  where messages of this kind go by copy engines.
    """
    sent = _by_rank(outgoing, like)
    for target, message in sent.messages():
        fill(target, message)
    if slots is not None:
        works, coming, finish = slots.start(kind, [*sent.messages()], incoming, like.dtype)
        return UnderWay(works, coming, [sent.buffer], finish)
    received = _by_rank(incoming, like)
    if is_together:
        splits = (received.splits(group.group_size), sent.splits(group.group_size))
        work = all_to_all_single(received.buffer, sent.buffer, *splits, group, async_op=True)
        works = [work] if work is not None else []
    else:
        messages = [P2POp(isend, message, group=group, group_peer=rank) for rank, message in sent.messages()]
        messages += [P2POp(irecv, message, group=group, group_peer=rank) for rank, message in received.messages()]
        works = batch_isend_irecv(messages) if messages else []
    return UnderWay(works, dict(received.messages()), [sent.buffer])


class _Messages(NamedTuple):
    """Messages one behind the other, in the order of the other ends' ranks."""

    buffer: torch.Tensor
    sizes: tuple[tuple[int, int], ...]

    def messages(self) -> Iterator[tuple[int, torch.Tensor]]:
        first = 0
        for rank, size in self.sizes:
            yield rank, self.buffer[first : first + size]
            first += size

    def splits(self, num_ranks: int) -> list[int]:
        sizes = dict(self.sizes)
        return [sizes.get(rank, 0) for rank in range(num_ranks)]


def _by_rank(sizes: Sequence[tuple[int, int]], like: torch.Tensor) -> _Messages:
    return _Messages(like.new_empty(sum(size for _, size in sizes)), tuple(sorted(sizes)))
