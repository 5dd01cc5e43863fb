"""The collectives of Gloo's rings by one message from each rank to each other one, which wait for the network once.

Gloo's own all-gather passes parts on from neighbour to neighbour, and so waits for the network once for each other
rank; its all-reduce, of which torch makes a reduce-scatter, waits twice as often, and sends twice the bytes of a
reduce-scatter (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005,
compare these algorithms). Here ranks exchange by Gloo's all-to-all, whose messages all travel at once, and add up what
they got in the order of ranks: each element alike, wherever it lies.

Gloo takes a message that is shorter than the room for it, and says nothing. So the size of each message is sent too, at
its end, or beside it where it is large and would take long to copy: the receiver sees that all of it has come.

Copies that are sent to all take memory and time, so that large gathers keep to the ring, as do large all-reduces, and
within a host all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import torch

from disttrain.process_group._c10d import ReduceOp, Reduction, reduction_kind
from disttrain.process_group.backends.base import GivableUp
from disttrain.process_group.backends.c10d_work import FinishingWork
from disttrain.process_group.backends.reduction import FOLDS
from disttrain.process_group.work import JoinedWork, TransportWork

GATHERED_BYTES = 2 * 2**20
"""Of all ranks' parts together: up to here a gather is direct, beyond it a ring that copies less takes less time."""
REDUCED_BYTES = 2**18
"""Of all ranks together: up to here an all-reduce between hosts is direct; a ring sends fewer bytes."""
_COPIED_BYTES: Final = 2**18
"""Of what a rank sends to all: up to here a copy of it takes less time than messages of its own for the sizes."""
_NARROW = frozenset({torch.float16, torch.bfloat16})
_ALIGNMENT: Final = 16
"""Of messages, in bytes: what the widest dtype needs to be read where it lies. Their last 8 bytes hold the size."""
_SMALLER: Final = "a message came that is smaller than what this rank waits for"


class DirectWork(FinishingWork):
    """Its last step is done also for who only sees that it has completed, as Gloo's own operations are."""

    __slots__ = ()

    def is_completed(self) -> bool:
        if not super().is_completed():
            return False
        with suppress(RuntimeError, InterruptedError):  # the caller's to raise, who waits for it
            self.wait()
        return True


def gathers_directly(part: torch.Tensor, num_ranks: int) -> bool:
    """Alike on all ranks."""
    return part.numel() * part.element_size() * num_ranks <= GATHERED_BYTES


def reduces_directly(tensor: torch.Tensor, num_ranks: int) -> bool:
    """True for small all-reduces between hosts; alike on all ranks. Within a host a ring takes less processor time."""
    return tensor.layout == torch.strided and tensor.numel() * tensor.element_size() * num_ranks <= REDUCED_BYTES


Parts = torch.Tensor | Sequence[torch.Tensor]
"""The data for each rank: rows of (ranks, elements), or flat tensors of one dtype and different sizes."""
Start = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], TransportWork]
"""Begins an all-to-all of flat tensors: received, sent, the sizes of the parts of each, empty where all are alike."""


class SizeExchange:
    """An exchange of the sizes of messages, apart from the messages themselves."""

    def __init__(self, parts: Parts, start: Start) -> None:
        sizes = torch.tensor([part.numel() * part.element_size() + 1 for part in parts], device="cpu")
        self._sizes = torch.zeros_like(sizes)
        self.work = start(self._sizes, sizes, (), ())

    def check(self, like: torch.Tensor, scope: GivableUp) -> Sequence[torch.Tensor]:
        """Raise unless each rank has sent as many bytes as are in `like`."""
        return _check_sizes(self._sizes, like, scope)


class Exchange:
    """One message to each rank, begun by `start`, and as many bytes as are in `like` from each."""

    def __init__(self, parts: Parts, like: torch.Tensor, num_ranks: int, start: Start) -> None:
        self._like = like
        self._sizes: SizeExchange | None = None
        num_sent = parts.numel() if isinstance(parts, torch.Tensor) else sum(part.numel() for part in parts)
        # Alike on all ranks, so that all send sizes in the same way.
        if num_sent * like.element_size() <= _COPIED_BYTES:
            row_size = _message_size(like)
            self._received = _empty(num_ranks, row_size)
            self._received.view(torch.int64)[:, -1] = 0
            self.work = _start(start, self._received, [row_size] * num_ranks, _with_sizes(parts))
        else:
            self._received = torch.empty(num_ranks, like.numel(), dtype=like.dtype, device="cpu")
            started = _start(start, self._received, [like.numel()] * num_ranks, parts)
            self._sizes = SizeExchange(parts, start)
            self.work = JoinedWork([started, self._sizes.work])

    def result(self, scope: GivableUp) -> torch.Tensor:
        """The received parts, (ranks, elements). Raises unless each rank has sent as many elements as expected."""
        if self._sizes is not None:
            self._sizes.check(self._like, scope)
            return self._received
        _check_sizes(self._received.view(torch.int64)[:, -1], self._like, scope)
        return self._received[:, : self._like.numel() * self._like.element_size()].view(self._like.dtype)


def _check_sizes(sizes: torch.Tensor, like: torch.Tensor, scope: GivableUp) -> Sequence[torch.Tensor]:
    if bool((sizes == like.numel() * like.element_size() + 1).all()):
        return ()
    try:
        # The group ends for what all of them call, if they say it.
        scope.look(_SMALLER)
        scope.check()
    finally:
        scope.looked()
    raise RuntimeError(_SMALLER)


def _start(start: Start, received: torch.Tensor, sizes: Sequence[int], parts: Parts) -> TransportWork:
    if isinstance(parts, torch.Tensor):
        return start(received.view(-1), parts.reshape(-1), (), ())
    return start(received.view(-1), torch.cat([*parts]), sizes, [part.numel() for part in parts])


def _with_sizes(parts: Parts) -> Parts:
    if isinstance(parts, torch.Tensor):
        return _messages(parts)
    return [_messages(part.view(1, -1)).view(-1) for part in parts]


def _messages(rows: torch.Tensor) -> torch.Tensor:
    """Each row, (messages, elements), with its size at the end, (messages, bytes)."""
    num_bytes = rows.shape[1] * rows.element_size()
    messages = _empty(rows.shape[0], _message_size(rows[0]))
    if num_bytes:
        messages[:, :num_bytes].view(rows.dtype).copy_(rows)
    # One more, so that no size is what lies there before it comes.
    messages.view(torch.int64)[:, -1] = num_bytes + 1
    return messages


def _message_size(part: torch.Tensor) -> int:
    return (part.numel() * part.element_size() + 8 + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _empty(num_rows: int, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_rows, num_bytes, dtype=torch.uint8, device="cpu")


def combine(parts: Sequence[torch.Tensor], op: Reduction, result: torch.Tensor) -> None:
    """Reduce what each rank has sent, tensors like `result`, into it. The first of them may be written to.

    16-bit floats are added up in 32 bits and rounded once. As where C++ writes, autograd does not see it.
    """
    kind = reduction_kind(op)
    fold = FOLDS[kind]
    # So that it may be of either kind, wherever it was made: one of inference, or one that asks for a gradient.
    with torch.inference_mode():
        total = parts[0]
        if total.dtype in _NARROW and fold is torch.add:
            total = total.float()
        for part in parts[1:]:
            fold(total, part, out=total)
        if kind == ReduceOp.AVG:
            total.div_(len(parts))
        result.data.copy_(total)
