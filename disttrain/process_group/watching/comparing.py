"""Compares the ranks' calls when a collective takes long, and finds members that can no longer come to it.

Nothing of this runs while calls end soon. A rank that waits for longer than a moment leaves what it calls in the store,
for the other ranks that wait in that collective to compare theirs with. Where nobody comes, it asks the others what
they are at, ever more rarely. Calls that do not fit, and ranks that have left the job, end the group on all ranks, with
one reason. What this rank has called is told by `World.recall`, which the flight recorder brings.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from disttrain._python import at_exit
from disttrain.errors import StoreError
from disttrain.process_group.watching.departures import pages_left, say_left
from disttrain.process_group.watching.fingerprint import Fields, find_mismatch

if TYPE_CHECKING:
    from disttrain.process_group.interfaces import GroupLike, WorldLike

ANSWER_S: Final = 2.0
"""The time that the others may take to answer."""
_FIRST_ASKED_AFTER_S: Final = 0.5
_MAX_REASON_CHARS: Final = 2000

Answer = dict[str, Any]
"""The message of a rank: `come_to`, the number and name of its last collective in the group; `call`, what it has called
as the one that is asked about, by `fields` and as `text`; `place`, where its main thread is, and which others have
failed."""


class _Wait:
    """This rank's wait in one collective."""

    def __init__(self, sequence: int, began_s: float) -> None:
        self.sequence = sequence
        self.began_s = began_s
        self.key = ""
        """The key of its own call, if it was the first."""


class Comparing:
    """The exchange of calls among the ranks of a world that wait."""

    def __init__(self, world: WorldLike) -> None:
        self._world = world
        self._waits: dict[str, _Wait] = {}
        self._ask_after_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}
        self._pid = os.getpid()

    def look(self, group: GroupLike, problem: str) -> None:
        """Called from time to time while this rank waits in `group`; ends the group where that is in vain.

        With a `problem` it is, whatever the others say.
        """
        sequence = group.waiting_in
        if not sequence or self._world.witness is None:
            if problem:
                group.give_up(group.last_operation, RuntimeError(problem))
            return
        with suppress(StoreError):  # Without a store nobody is told; the transport's own timeout ends the wait.
            wait = self._waits.get(group.group_name)
            if wait is None or wait.sequence != sequence:
                wait = self._waits[group.group_name] = _Wait(sequence, time.monotonic())
                self._meet(group, wait)
            look_for_gone(group, sequence)
            if wait.key and self._may_ask(group.group_name, wait):
                self._ask(group, sequence)
            if problem and not group.ended_by:
                self._ask(group, sequence, problem)

    def waited(self, group: GroupLike) -> None:
        """The wait in which this rank has looked is over."""
        wait = self._waits.pop(group.group_name, None)
        if wait is not None and wait.key:
            with suppress(StoreError):
                self._world.store.delete_key(wait.key)

    def stay(self) -> None:
        """Have the others told when this process ends, also without destroying its world."""
        at_exit.register(self.leave)

    def leave(self) -> None:
        """This rank comes to no collective any more."""
        at_exit.unregister(self.leave)
        if os.getpid() != self._pid:
            return  # A child that was forked off is no rank.
        come_to = {group.group_name: group.sequence for group in self._world.groups if group.sequence}
        with suppress(StoreError):
            say_left(self._world.store, self._world.rank, come_to)

    def answer(self, about: str) -> bytes:
        """This rank's answer to the question of another."""
        group_name, sequence = json.loads(about)
        group = self._world.group_named(group_name)
        said: Answer = {
            "come_to": (0, "") if group is None else group.come_to,
            "call": self._world.recall(group_name, sequence),
            "place": self._world.main_place() + self._lost_threads(),
        }
        return json.dumps(said).encode()

    def _lost_threads(self) -> str:
        errors = self._world.thread_errors
        return "".join(f"; {error}" for error in errors.kept) if errors is not None else ""

    def hear(self, said: Mapping[str, Any]) -> None:
        """Some ranks' calls don't fit."""
        group = self._world.group_named(said["mismatch"])
        if group is not None:
            group.end(said["reason"])

    def _meet(self, group: GroupLike, wait: _Wait) -> None:
        """Compare with the first that waits there, or become that."""
        key = f"{group.group_name}/waiting/{wait.sequence}"
        call = self._world.recall(group.group_name, wait.sequence)
        entry = json.dumps([self._world.rank, call]).encode()
        first = self._world.store.compare_set(key, "", entry)
        if first == entry:
            wait.key = key
            return
        rank, first_call = json.loads(first)
        # All that do not fit to the first find it out together: one asks the others, and speaks for all.
        if mismatch({rank: first_call, self._world.rank: call}) and self._world.store.add(f"{key}/asked", 1) == 1:
            self._ask(group, wait.sequence)

    def _may_ask(self, group_name: str, wait: _Wait) -> bool:
        """Not at once, and from then on after twice the time, since all members take part."""
        now_s = time.monotonic()
        since_s = now_s - max(wait.began_s, self._asked_s.get(group_name, 0.0))
        after_s = self._ask_after_s.setdefault(group_name, _FIRST_ASKED_AFTER_S)
        if since_s < after_s:
            return False
        self._asked_s[group_name], self._ask_after_s[group_name] = now_s, 2 * after_s
        return True

    def _ask(self, group: GroupLike, sequence: int, known_problem: str = "") -> None:
        calls = {rank: said["call"] for rank, said in ask_members(group, sequence).items()}
        if problem := mismatch(calls):
            self._end(group, f"the ranks called different things as sequence {sequence}: {problem}.")
        elif known_problem:
            self._end(group, f"{known_problem} in sequence {sequence}: {calls_text(calls)}.")

    def _end(self, group: GroupLike, reason: str) -> None:
        """On all ranks. Of several that find it out, the first speaks for all, this rank too."""
        witness = self._world.witness
        if witness is not None:
            notice = json.dumps({"mismatch": group.group_name, "reason": reason[:_MAX_REASON_CHARS]}).encode()
            witness.tell(notice, f"mismatch/{group.group_name}")
            witness.hear_again()
        group.end(reason)


def look_for_gone(group: GroupLike, sequence: int) -> None:
    """End `group` where a member has left the job that has not come to this collective. Raises StoreError."""
    for page in pages_left(group):
        gone = {rank: come_to for rank, come_to in page.items() if come_to < sequence}
        if gone:
            # Who refused a call and left said so first, and that is the reason.
            if not group.find_reason():
                group.end(f"not every rank came, nor can: {left_text(gone)}.")
            return


def ask_members(
    group: GroupLike, sequence: int, ranks: Sequence[int] | None = None, timeout_s: float = ANSWER_S
) -> dict[int, Answer]:
    """The answers of the members, of `ranks` if that is given, that answer in time."""
    witness = group.world.witness
    about = json.dumps([group.group_name, sequence])
    said = {} if witness is None else witness.ask(group.ranks if ranks is None else ranks, timeout_s, about)
    return {rank: json.loads(answer) for rank, answer in said.items()}


def left_text(gone: Mapping[int, int]) -> str:
    """Ranks that have left the job, and how far each came in the group that is asked about."""
    return ", ".join(
        f"rank {rank} has left the job {f'after sequence {come_to}' if come_to else 'before the first collective'}"
        for rank, come_to in gone.items()
    )


def mismatch(calls: Mapping[int, Mapping[str, Any] | None]) -> str:
    """The fields that differ, by rank, and from where they call; empty when all is well, or nothing is known."""
    reported = {rank: call for rank, call in sorted(calls.items()) if call is not None}
    fields: dict[int, Fields] = {rank: dict(call["fields"]) for rank, call in reported.items()}
    if len({each["operation"] for each in fields.values()}) > 1:
        # What else differs comes of that.
        fields = {rank: {"operation": each["operation"]} for rank, each in fields.items()}
    problem = find_mismatch(fields)
    if not problem:
        return ""
    return f"{problem} ({calls_text(reported)})"


def calls_text(calls: Mapping[int, Mapping[str, Any] | None]) -> str:
    """The call of each rank, and from where: `ranks 0,2 all_reduce of float32[4] at train.py:9 in step; rank 1 ...`."""
    alike: dict[str, list[str]] = {}
    for rank, call in sorted(calls.items()):
        if call is not None:
            alike.setdefault(call["text"], []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {','.join(ranks)} {text}" for text, ranks in alike.items())
