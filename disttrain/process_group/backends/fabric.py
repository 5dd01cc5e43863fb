"""Operations among ranks that are threads of one process. A deadlock is reported, not waited out.

The members of a `FabricOperation` join it; the last one does the work for all. The `Fabric` knows all threads, so it
sees when each one that still runs waits for an operation that nobody is left to complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch

from disttrain.errors import BackendError, CollectiveMismatchError, CollectiveTimeoutError

Payload = TypeVar("Payload")
Combine = Callable[[Sequence[Payload]], None]


@dataclass(eq=False)
class FabricOperation:
    """One collective or message: the call and the payload of each member, and how it ended."""

    title: str
    size: int
    brought: dict[int, object] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)
    error: Exception | None = None
    is_over: bool = False
    source_rank: int = -1
    """The sender's, when it was a message."""
    futures: list[torch.futures.Future[Any]] = field(default_factory=list)

    def end(self, error: Exception | None) -> None:
        self.error = error
        self.is_over = True
        for future in self.futures:
            self.settle(future)

    def settle(self, future: torch.futures.Future[Any]) -> None:
        """Tell `future` how it ended."""
        if self.error is None:
            future.set_result(None)
        else:
            future.set_exception(self.error)


@dataclass(eq=False)
class Envelope:
    """One end of a message. `source_rank` is None for a receiver that takes anybody's."""

    tensor: torch.Tensor
    is_sending: bool
    source_rank: int | None
    operation: FabricOperation = field(default_factory=lambda: FabricOperation("message", 2))

    def suits(self, other: Envelope) -> bool:
        return None in (self.source_rank, other.source_rank) or self.source_rank == other.source_rank


class Fabric:
    """The operations under way in one world of threads. All ranks share it; it is handed over as `pg_options`."""

    def __init__(self, world_size: int) -> None:
        self._changed = threading.Condition()
        self._running = set(range(world_size))
        self._waiting: dict[int, FabricOperation] = {}
        self._open: dict[Hashable, FabricOperation] = {}
        self._envelopes: dict[Hashable, list[Envelope]] = {}

    def join(
        self, key: Hashable, title: str, size: int, member: int, payload: Payload, combine: Combine[Payload]
    ) -> FabricOperation:
        """Member `member` of `size` joins operation `key`; the last one runs `combine` on payloads by member."""
        with self._changed:
            operation = self._open.setdefault(key, FabricOperation(title, size))
            operation.brought[member] = payload
            operation.titles[member] = title
            if len(operation.brought) == size:
                del self._open[key]
                operation.end(_run(operation, combine))
                self._changed.notify_all()
            return operation

    def exchange(self, box: Hashable, title: str, envelope: Envelope) -> FabricOperation:
        """Sender or receiver of a message comes; it takes the first of the other kind in `box` that suits it."""
        with self._changed:
            waiting = self._envelopes.setdefault(box, [])
            for other in waiting:
                if other.is_sending != envelope.is_sending and other.suits(envelope):
                    waiting.remove(other)
                    sent, received = (envelope, other) if envelope.is_sending else (other, envelope)
                    operation = other.operation
                    assert sent.source_rank is not None
                    operation.source_rank = sent.source_rank
                    operation.brought = {0: sent.tensor, 1: received.tensor}
                    operation.end(_run(operation, _deliver))
                    self._changed.notify_all()
                    return operation
            waiting.append(envelope)
            envelope.operation.title = title
            return envelope.operation

    def wait(self, operation: FabricOperation, global_rank: int, timeout_s: float) -> None:
        """Block until the operation is over; raises what it ended with, or a deadlock's report."""
        with self._changed:
            self._waiting[global_rank] = operation
            try:
                self._end_if_deadlocked()
                if not self._changed.wait_for(lambda: operation.is_over, timeout_s):
                    arrived = ", ".join(str(member) for member in sorted(operation.brought))
                    who = f"only group ranks {arrived} of {operation.size}" if arrived else "nobody at the other end"
                    raise CollectiveTimeoutError(
                        operation.title,
                        f"{who} came within {timeout_s:g} s.",
                        "Look for a rank that hangs or takes another branch.",
                        rank=global_rank,
                    )
            finally:
                del self._waiting[global_rank]
        if operation.error is not None:
            raise operation.error

    def future(self, operation: FabricOperation) -> torch.futures.Future[Any]:
        """A future that is done when the operation is over."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self._changed:
            if operation.is_over:
                operation.settle(future)
            else:
                operation.futures.append(future)
        return future

    def leave(self, global_rank: int) -> None:
        """The thread of `global_rank` has ended; whoever waits for it alone waits for nothing."""
        with self._changed:
            self._running.discard(global_rank)
            self._end_if_deadlocked()

    def _end_if_deadlocked(self) -> None:
        waiting = {rank: operation for rank, operation in self._waiting.items() if not operation.is_over}
        if not waiting or set(waiting) != self._running:
            return
        stuck = "; ".join(f"rank {rank} waits in {waiting[rank].title}" for rank in sorted(waiting))
        for operation in waiting.values():
            operation.end(
                CollectiveMismatchError(
                    operation.title,
                    f"deadlock: {stuck}; every other rank has ended.",
                    "Make all members of a group call the same operations in the same order.",
                )
            )
        self._open = {key: operation for key, operation in self._open.items() if not operation.is_over}
        self._envelopes = {
            box: [envelope for envelope in waiting if not envelope.operation.is_over]
            for box, waiting in self._envelopes.items()
        }
        self._changed.notify_all()


def _run(operation: FabricOperation, combine: Combine[Payload]) -> Exception | None:
    if len(set(operation.titles.values())) > 1:
        calls = "; ".join(
            f"group rank {member} called {operation.titles[member]}" for member in sorted(operation.titles)
        )
        return CollectiveMismatchError(
            operation.title, f"the members called different operations: {calls}.", "Call the same one on every rank."
        )
    try:
        # The thread that came last writes for all: to any tensor, and beside autograd, as transports do.
        with torch.inference_mode():
            combine([operation.brought[member] for member in range(operation.size)])  # type: ignore[misc]
    except (RuntimeError, ValueError) as error:
        return BackendError(operation.title, f"it failed on the values the members brought: {error}")
    return None


def copy_flat(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy all elements, whatever the shapes; nothing is broadcast or converted."""
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise ValueError(
            f"{source.numel()} elements of {source.dtype} came for a tensor of {target.numel()} of {target.dtype}."
        )
    if target.data_ptr() != source.data_ptr() or target.numel() == 0:
        target.view(-1).copy_(source.view(-1))


def _deliver(ends: Sequence[torch.Tensor]) -> None:
    copy_flat(ends[1], ends[0])


class FabricWork:
    """The handle of an operation for one of its members."""

    __slots__ = ("_fabric", "_global_rank", "_operation", "_timeout_s")

    def __init__(self, fabric: Fabric, operation: FabricOperation, global_rank: int, timeout_s: float) -> None:
        self._fabric = fabric
        self._operation = operation
        self._global_rank = global_rank
        self._timeout_s = timeout_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._fabric.wait(
            self._operation, self._global_rank, self._timeout_s if timeout is None else timeout.total_seconds()
        )
        return True

    def is_completed(self) -> bool:
        return self._operation.is_over

    def get_future(self) -> torch.futures.Future[Any]:
        return self._fabric.future(self._operation)

    def source_rank(self) -> int:
        """Of a message: its sender's rank in the group."""
        return self._operation.source_rank
