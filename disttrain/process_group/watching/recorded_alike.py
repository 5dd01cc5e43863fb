"""Has the ranks of a group agree on what they have recorded as a graph, before one of them launches it.

A graph is launched as a whole: ranks whose graphs differ would wait on their GPUs, where no host looks. So each rank
says in the store what it has recorded in each group; the last one compares, and leaves a verdict for all. A rank that
runs the step as it is, or replays it, does not come there. One of those that wait asks it what it has called, and it is
left alone where that fits: NCCL takes both.

Collectives are compared, not messages. Without a flight recorder nothing is known of them, and nobody waits.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from disttrain.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CompileError,
    DisttrainError,
    StoreTimeoutError,
)
from disttrain.process_group.watching.comparing import ask_members, calls_text, mismatch
from disttrain.process_group.watching.refusals import ANY
from disttrain.store import PrefixStore
from disttrain.store.attendance import once
from disttrain.store.rank_runs import from_runs, in_words, is_among, to_runs

if TYPE_CHECKING:
    from disttrain.process_group.group import ProcessGroup
    from disttrain.process_group.world import World

OPERATION: Final = "capture_step"
_FIRST_SLICE_S: Final = 0.05
_SLICE_S: Final = 0.5
_MEMBERS_PER_PAGE: Final = 64
"""That say under one key what they have recorded: a key of all would be copied with each that comes."""
_FIRST_ASKED_AFTER_S: Final = 0.5
_REMEDY: Final = "Have all ranks of a group record the same collectives, in the same order; or call the step as it is."

RecordedCall = Mapping[str, Any]
"""A collective: its `fields`, which have to be alike on all ranks, and as `text`."""


def find_difference(recorded: Mapping[int, Sequence[RecordedCall]]) -> str:
    """The first collective in which the ranks' recordings differ, with its lines; empty where they are alike."""
    for index in range(max(map(len, recorded.values()), default=0)):
        calls = {rank: calls[index] if index < len(calls) else None for rank, calls in recorded.items()}
        title = f"collective {index + 1} of the recording"
        ended = sorted(rank for rank, call in calls.items() if call is None)
        if ended:
            noun = f"rank{'s' * (len(ended) > 1)} {','.join(map(str, ended))}"
            return f"{title}: {noun} recorded no more than {index}; {calls_text(calls)}"
        if problem := mismatch(calls):
            return f"{title}: {problem}"
    return ""


class Agreement:
    """One recording of this rank's: made before it begins; then `agree`, or `refuse` where it has failed.

    Args: world     None where there is none: then all is agreed on.
          expected  names of groups that the step has used before. In these the ranks meet even if one records nothing.
    """

    def __init__(self, world: World | None, expected: Iterable[str]) -> None:
        groups = () if world is None else world.groups
        self._begun = {group: group.sequence for group in groups if _has_others(group)}
        self._expected = frozenset(expected)
        self._met: set[ProcessGroup] = set()
        if world is not None and world.recorder is not None and self._begun:
            world.become_witness()

    def agree(self, recorded: Mapping[str, Sequence[RecordedCall]]) -> None:
        """Returns once all ranks have recorded the same in each group of `recorded`, by name.

        Raises, on all that have recorded: CollectiveMismatchError with the first difference; CompileError where another
        rank could not record the step; CollectiveTimeoutError where one did not come within the group's timeout.
        """
        meetings = [
            _Meeting(group, begun, recorded.get(group.group_name, ()))
            for group, begun in self._begun.items()
            # What was called on CPUs is no part of the recording, and nothing need be recorded beside it.
            if recorded.get(group.group_name) or (group.group_name in self._expected and group.sequence == begun)
        ]
        for meeting in meetings:
            self._met.add(meeting.group)
            meeting.come()
        for meeting in meetings:
            meeting.wait()

    def refuse(self, error: Exception) -> None:
        """This rank does not launch its recording: nobody may wait for it, whether in `agree` or in a collective."""
        for group, begun in self._begun.items():
            is_used = group.group_name in self._expected or group.sequence != begun
            try:
                if is_used and group not in self._met:
                    _Meeting(group, begun, ()).come(error)
                group.sequence = begun
                if is_used or group.group_name == "world":
                    group.refuse(OPERATION, error, ANY)
            except DisttrainError as reason:
                error.add_note(f"The other ranks could not be told: {reason}")


class _Meeting:
    """The ranks of a group that have recorded its collectives from the one after `begun` on."""

    def __init__(self, group: ProcessGroup, begun: int, calls: Sequence[RecordedCall]) -> None:
        self.group, self._begun, self._calls = group, begun, calls
        self._key = f"{group.group_name}/recorded/{begun}"
        self._store = PrefixStore(self._key, group.world.store)

    def come(self, error: Exception | None = None) -> None:
        """Says what this rank has recorded, or why it could not. The last to come leaves the verdict."""
        group, rank = self.group, self.group.world.rank
        number = group.num_agreed[self._begun] = group.num_agreed.get(self._begun, 0) + 1
        self._store = PrefixStore(f"{self._key}/{number}", group.world.store)
        failure = "" if error is None else (error.problem if isinstance(error, DisttrainError) else repr(error))
        digest = hashlib.sha256(json.dumps([call["fields"] for call in self._calls]).encode()).hexdigest()
        if not failure and not self._store.check([digest]):
            self._store.set(digest, json.dumps(self._calls))
        page = (group.members.position(rank) or 0) // _MEMBERS_PER_PAGE
        self._store.append(f"made/{page}", json.dumps([rank, digest, failure]) + "\n")
        if self._store.add("num_made", 1) == group.group_size:
            self._store.set("verdict", json.dumps(self._judge()))

    def wait(self) -> None:
        """Returns when the others have recorded the same, or run it as it is."""
        group = self.group
        asks_at_s = time.monotonic() + _FIRST_ASKED_AFTER_S
        deadline_s = time.monotonic() + group.timeout_s
        slice_s, num_asked, num_late = _FIRST_SLICE_S, 0, 0
        verdict = None
        while verdict is None:
            with suppress(StoreTimeoutError):
                self._store.wait(["verdict"], slice_s)
                verdict = json.loads(self._store.get("verdict"))
                continue
            if group.ended_by:
                raise CollectiveMismatchError(OPERATION, group.ended_by, _REMEDY, rank=group.world.rank)
            slice_s = min(2 * slice_s, _SLICE_S, max(_FIRST_SLICE_S, deadline_s - time.monotonic()))
            if time.monotonic() >= deadline_s:
                # All are late at the same time: one finds out for all who is absent.
                absent = once(self._store, f"absent/{num_late}", self._ask)
                num_late += 1
                if absent and not is_among(absent, group.world.rank):
                    raise self._timeout(from_runs(absent))
            elif time.monotonic() >= asks_at_s:
                # All come here about the same time. Should who asks for all be gone, another does it the next time.
                if self._store.add(f"asked/{num_asked}", 1) == 1:
                    self._ask()
                num_asked += 1
                asks_at_s = time.monotonic() + (_FIRST_ASKED_AFTER_S * 2**num_asked)
        problem, failed = verdict
        where = f"group {group.group_name}, ranks {group.ranks_text()}"
        if failed:
            remedy = "Mend what that rank could not record, or call the step as it is."
            raise CompileError(OPERATION, problem, remedy, rank=group.world.rank, where=where)
        if problem:
            text = f"the ranks recorded different things: {problem}."
            raise CollectiveMismatchError(OPERATION, text, _REMEDY, rank=group.world.rank, where=where)

    def _come(self) -> dict[int, tuple[str, str]]:
        """Of each rank that has come the digest of what it has recorded, and why it could not."""
        pages = [f"made/{page}" for page in range(-(-self.group.group_size // _MEMBERS_PER_PAGE))]
        texts = self._store.multi_get([page for page in pages if self._store.check([page])])
        lines = (json.loads(line) for text in texts for line in text.decode().splitlines())
        return {rank: (digest, failure) for rank, digest, failure in lines}

    def _ask(self) -> str:
        """The ranks that have not come, as runs; where these all run the step as it is, none, and the verdict is left
        for all."""
        come = self._come()
        absent = sorted(rank for rank in self.group.members if rank not in come)
        if not self._run_it_as_it_is(absent):
            return to_runs(absent)
        self._store.compare_set("verdict", "", json.dumps(self._judge()))
        return ""

    def _judge(self) -> tuple[str, bool]:
        """Tells the fault among those that have come, and whether it is that one could not record."""
        come = dict(sorted(self._come().items()))
        for rank, (_, failure) in come.items():
            if failure:
                return f"rank {rank} could not record the step: {failure}", True
        digests = {digest for digest, _ in come.values()}
        if len(digests) == 1:
            return "", False
        lists = {digest: json.loads(self._store.get(digest)) for digest in digests}
        return find_difference({rank: lists[digest] for rank, (digest, _) in come.items()}), False

    def _run_it_as_it_is(self, absent: Sequence[int]) -> bool:
        """True if all of these have called the first collective, and as it was recorded here.

        While a rank records, or is on its way, it knows of no such call. One that differs ends the group.
        """
        said = ask_members(self.group, self._begun + 1, absent) if absent else {}
        calls = {rank: answer["call"] for rank, answer in said.items() if answer["call"] is not None}
        first_call = self._calls[0] if self._calls else None
        if calls and (first_call is None or mismatch({self.group.world.rank: first_call, **calls})):
            problem = find_difference({self.group.world.rank: self._calls[:1], **{r: [c] for r, c in calls.items()}})
            error = CollectiveMismatchError(
                OPERATION, f"a rank runs another step than was recorded: {problem}.", _REMEDY
            )
            self.group.give_up(OPERATION, error)
            raise error
        return len(calls) == len(absent)

    def _timeout(self, absent: Sequence[int]) -> CollectiveTimeoutError:
        group = self.group
        ranks = f"rank{'s' * (len(absent) > 1)} {in_words(absent)}"
        return CollectiveTimeoutError(
            OPERATION,
            f"this rank has recorded the step, and {ranks} did not within {group.timeout_s:g} s, nor called it.",
            "Look for a rank that died, hangs, or takes another branch.",
            rank=group.world.rank,
            where=f"group {group.group_name}, ranks {group.ranks_text()}, sequence {self._begun + 1}",
        )


def _has_others(group: ProcessGroup) -> bool:
    """True if it has other ranks, that are there: a world may be one to estimate with."""
    return group.group_size > 1 and any(kind.has_peers for kind in group.backend_classes.values())


def last_used(world: World | None, before: Mapping[str, int]) -> frozenset[str]:
    """The groups with other ranks in which something was called since their numbers were as `before`."""
    groups = () if world is None else world.groups
    return frozenset(
        group.group_name
        for group in groups
        if group.group_size > 1 and group.sequence != before.get(group.group_name, 0)
    )
