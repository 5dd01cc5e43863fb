"""The interface of observers, which see each collective as a `Call`, when it is enqueued and when it is over.

Byte counters and tests are observers. They are kept by the `World`; with none, a call costs nothing more. The flight
recorder, which is there in every job, is a `Recorder`: it is told without a `Call`, which would cost more than it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from disttrain.errors import (
    BackendError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DisttrainError,
    StoreTimeoutError,
)
from disttrain.process_group.interfaces import GroupLike, WorldLike
from disttrain.process_group.watching.roll_call import absent_text, gone_text


class Observer(Protocol):
    """Sees every collective of a world. Its methods are on the hot path and must not raise."""

    def enqueued(self, call: Call) -> None:
        """`call` is about to be handed to its transport."""
        ...

    def completed(self, call: Call, error: DisttrainError | None) -> None:
        """The host has waited for `call`. On CUDA the device may still be at it."""
        ...


How = str | tuple[tuple[int, ...], tuple[int, ...]] | None
"""The name of a reduction, where it is no sum; the rows that a rank receives and sends, where they are not equal."""


class Recorder(Protocol):
    """Keeps every collective of a world. Its methods are on the hot path and must not raise."""

    def begin(
        self,
        operation: str,
        group: GroupLike,
        sequence: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        peer_rank: int | None,
        how: How = None,
    ) -> Any:
        """As `Observer.enqueued`, called by `issue` itself. Returns: what `end` is to be given, never None."""
        ...

    def waits(self, record: Any) -> None:
        """The host begins to wait for a call that it has gone on beside; before `end`, once."""
        ...

    def end(self, record: Any, error: DisttrainError | None) -> None:
        """As `Observer.completed`; once for each call."""
        ...

    def listing(self) -> AbstractContextManager[Any]:
        """Within it calls are recorded as parts of a graph: they are listed. Returns: `replaying.Replays`."""
        ...

    def close(self) -> None:
        """The world is being destroyed."""
        ...


class ObservedWorld(WorldLike, Protocol):
    """A world whose collectives are seen."""

    observers: tuple[Observer, ...]
    recorder: Recorder | None

    def add_observer(self, observer: Observer) -> None: ...

    def remove_observer(self, observer: Observer) -> None: ...


@dataclass(slots=True, eq=False)
class Call:
    """One collective or point-to-point operation, as this rank issues it.

    `sequence` counts the group's collectives from 1, alike on all its ranks; point-to-point operations, which only two
    ranks see, have 0. `peer_rank` is the group rank of the root, destination or source. `action` and `module` are the
    world's at that moment: what it was called for.
    """

    operation: str
    group: GroupLike
    sequence: int
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    peer_rank: int | None = None
    observers: tuple[Observer, ...] = ()
    action: str = ""
    module: str = ""

    def enqueued(self) -> None:
        for observer in self.observers:
            observer.enqueued(self)

    def completed(self, error: DisttrainError | None) -> None:
        """Tell the observers, once, that the host's wait is over."""
        observers, self.observers = self.observers, ()
        for observer in observers:
            observer.completed(self, error)

    def failure(self, error: Exception) -> DisttrainError:
        """Translates a transport's error into one that names operation, group, sequence number and rank."""
        if isinstance(error, DisttrainError) and not isinstance(error, StoreTimeoutError):
            return error
        group = self.group
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f"group {group.group_name}, ranks {group.ranks_text()}, sequence {self.sequence}"
        where += "".join(f", {label}" for label in (self.action, self.module) if label)
        reason = group.find_reason()
        if reason:
            return CollectiveMismatchError(
                self.operation,
                reason,
                "Mend that call; the group cannot be used any more.",
                rank=group.world.rank,
                where=where,
            )
        peer = "" if self.peer_rank is None else f" with group rank {self.peer_rank}"
        if isinstance(error, TimeoutError) or "timed out" in text.lower() or "timeout" in text.lower():
            absent = absent_text(group, self.sequence, self.peer_rank)
            return CollectiveTimeoutError(
                self.operation,
                f"not every rank came{peer} within {group.timeout_s:g} s{absent} ({text}).",
                "Look for a rank that died, hangs, or takes another branch.",
                rank=group.world.rank,
                where=where,
            )
        return BackendError(
            self.operation,
            f"the transport failed{peer}: {text.rstrip('.')}{gone_text(group)}.",
            "A peer that died or called something else is the usual cause; look at the first error of the job.",
            rank=group.world.rank,
            where=where,
        )
