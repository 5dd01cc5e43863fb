"""Tells the other ranks when one refuses a call for its arguments, so that they don't wait until their timeout.

A rank that raises before it has come to a collective tells the witnesses of the other ranks (`store/responder.py`) if,
a moment later, it has still not come there; it takes that back when it comes after all. A witness whose rank is in that
collective, and has not refused it too, ends the group: the rank raises within a second, with the reason. Nothing of
this runs while all is well. docs/decisions/010-refusals-are-told.md says why it is done so.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from disttrain._python import at_exit
from disttrain.errors import DisttrainError

if TYPE_CHECKING:
    from disttrain.process_group.interfaces import GroupLike
    from disttrain.process_group.watching.observer import Call, ObservedWorld

_MOMENT_S = 0.25
"""The time that a rank which has refused may take to call the collective correctly."""

_MAX_REASON_CHARS = 1000


ANY = "any"
"""Whatever collective the others are in: the rank would have come to it."""


def is_recomputed_enough(error: BaseException | None) -> bool:
    """True for the exception by which torch's activation checkpoints leave a forward early that they compute again: the
    rank goes on, and has nothing to tell. By its name, since torch does not make it public."""
    return type(error).__name__ == "_StopRecomputationError"


class Refusal(NamedTuple):
    """A refused call, in place of collective `sequence` of its group; `number` counts refusals there, from 1.

    `operation` is what was called, `begins_with` the collective that the others are in, or ANY.
    """

    group_name: str
    sequence: int
    number: int
    operation: str
    begins_with: str
    rank: int
    reason: str
    is_final: bool
    """The rank was in that collective already, and so were the others when they connected."""

    @property
    def name(self) -> str:
        """Alike for what all ranks refuse."""
        return f"{self.group_name}/{self.sequence}/{self.number}"


class _OwnRefusal:
    """A refusal of this rank's, of which the others may have been told."""

    def __init__(self, group: GroupLike, refusal: Refusal) -> None:
        self.group = group
        self.refusal = refusal
        self.is_told = False

    @property
    def is_final(self) -> bool:
        """The rank cannot come to that collective any more."""
        return self.refusal.is_final

    def is_connecting(self) -> bool:
        """True when the rank is about to come to that collective."""
        return self.group.come_to[0] > self.group.sequence >= self.refusal.sequence - 1


class Refusals:
    """The refusals in a world, as one of its ranks sees them. An observer, while this rank has refused something."""

    def __init__(self, world: ObservedWorld) -> None:
        self._world = world
        self._own: list[_OwnRefusal] = []
        self._lock = threading.Lock()

    def add(self, group: GroupLike, operation: str, error: Exception, begins_with: str, *, was_counted: bool) -> None:
        """This rank raises `error` instead of taking part in `operation`; the others are told, unless it comes yet.

        `was_counted`: the group's sequence number is that of this call already, so that it cannot come any more.
        """
        sequence = group.sequence if was_counted else group.sequence + 1
        number = group.num_refused[sequence] = group.num_refused.get(sequence, 0) + 1
        if not group.asks_witnesses:
            return
        rank = self._world.rank
        refusal = Refusal(group.group_name, sequence, number, operation, begins_with, rank, _reason(error), was_counted)
        self._world.become_witness()
        with self._lock:
            self._own.append(_OwnRefusal(group, refusal))
        if not was_counted:
            self._world.remove_observer(self)
            self._world.add_observer(self)
        # Registered after the witness, this runs before the witness is closed. Often the error ends the process.
        at_exit.unregister(self.tell)
        at_exit.register(self.tell)
        timer = threading.Timer(_MOMENT_S, self.tell)
        timer.daemon = True
        timer.start()

    def end(self, group: GroupLike, operation: str, error: Exception) -> None:
        """This rank cannot go on in `group`: wherever the others are in it, their witnesses end it."""
        if not group.asks_witnesses and self._world.witness is None:
            return
        self._world.become_witness()
        assert self._world.witness is not None
        # Before the first collective of all, which everybody has come to.
        refusal = Refusal(group.group_name, 0, 1, operation, ANY, self._world.rank, _reason(error), is_final=True)
        self._world.witness.tell(json.dumps(refusal).encode(), refusal.name)

    def tell(self) -> None:
        """Tell the others of the collectives that this rank has refused and not come to since."""
        witness = self._world.witness
        with self._lock:
            for entry in self._own:
                if not entry.is_told and not entry.is_connecting() and witness is not None:
                    entry.is_told = True
                    # If all ranks refuse alike, the first one speaks for all.
                    witness.tell(json.dumps(entry.refusal).encode(), entry.refusal.name)
            self._own = [entry for entry in self._own if not (entry.is_told and entry.is_final)]

    def enqueued(self, call: Call) -> None:
        """This rank has come to a collective: perhaps one that it had refused."""
        with self._lock:
            come = [
                entry
                for entry in self._own
                if entry.group is call.group and entry.refusal.sequence == call.sequence and not entry.is_final
            ]
            for entry in come:
                self._own.remove(entry)
                if entry.is_told and self._world.witness is not None:
                    self._world.witness.withdraw(entry.refusal.name)
            if all(entry.is_final for entry in self._own):
                self._world.remove_observer(self)

    def completed(self, call: Call, error: DisttrainError | None) -> None:
        """Nothing changes by that."""

    def hear(self, notice: Sequence[Any]) -> bool:
        """Another rank has refused. False: it is not known yet whether this one will be waiting for it."""
        refusal = Refusal(*notice)
        group = self._world.group_named(refusal.group_name)
        if group is None:
            return False
        if refusal.rank == self._world.rank or group.num_refused.get(refusal.sequence, 0) >= refusal.number:
            return True
        sequence, operation = group.come_to
        if sequence < refusal.sequence or not _waits(group, sequence, refusal):
            return False
        witness = self._world.witness
        is_ours = sequence > refusal.sequence or refusal.begins_with in (operation, ANY)
        # Otherwise it was a call of that rank's own, which nobody waits for.
        if is_ours and witness is not None and not witness.is_withdrawn(refusal.name):
            group.end(f"rank {refusal.rank} refused {refusal.operation}: {refusal.reason}")
        return True

    def close(self) -> None:
        """Tell what is left to tell; the world ends."""
        at_exit.unregister(self.tell)
        self.tell()


def _reason(error: Exception) -> str:
    reason = (
        error.problem if isinstance(error, DisttrainError) else f"{type(error).__name__}: {error}".rstrip(".: ") + "."
    )
    return reason[:_MAX_REASON_CHARS]


def _waits(group: GroupLike, sequence: int, refusal: Refusal) -> bool:
    """True when this rank waits in collective `sequence` for who has refused, or is past it.

    While it is on its way there, it may be about to refuse the same, and only be slower.
    """
    if sequence > refusal.sequence or group.waiting_in == sequence:
        return True
    return group.is_connecting and not refusal.is_final
