"""Agrees on one outcome among ranks: each does its part, rank 0 decides, all return the same or raise the same.

Ballots and answers go through a store, not through collectives: a rank that fails can still say so, a rank that has
gone is named, and nothing on a GPU's stream is touched. A round costs each rank four requests, and one more each time
that its wait has become twice as long. Rank 0 reads some ballots at a time, and asks once for all who has not come.
Torch-free: the processes that write saves meet like this too.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgpack

from disttrain.errors import (
    CheckpointCorruptError,
    CheckpointError,
    DisttrainError,
    StoreLimitError,
    StoreTimeoutError,
)
from disttrain.settings import CHECKPOINT_ORPHAN_TIMEOUT_S, CHECKPOINT_TIMEOUT_S
from disttrain.store import Store
from disttrain.store.attendance import absent
from disttrain.store.slices import in_slices

Part = TypeVar("Part")


_BALLOTS_AT_ONCE = 64


class Codec(NamedTuple):
    """Encoding of ballots and answers."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


def _unpack_plain(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


PLAIN = Codec(msgpack.packb, _unpack_plain)
"""Without tensors; tuples become lists."""

_REMEDIES = {
    errno.ENOSPC: "Free some space, or save elsewhere; what was there before is as it was.",
    errno.EDQUOT: "Free some of the quota, or save elsewhere; what was there before is as it was.",
    errno.EACCES: "Check the owner and the mode of the folder.",
    errno.EPERM: "Check the owner and the mode of the folder.",
    errno.ENOENT: "All nodes must see the same folder, and nobody may remove it meanwhile.",
    errno.EROFS: "Save to a file system that may be written to.",
}


class Assembly:
    """Ranks that meet at a store, or one process alone without any."""

    def __init__(
        self,
        operation: str,
        rank: int,
        size: int,
        store: Store | None,
        codec: Codec = PLAIN,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """`ranks`: what its members are called in messages, where they are not called by their numbers."""
        self.operation = operation
        self.rank = rank
        self.size = size
        self._ranks = tuple(range(size)) if ranks is None else tuple(ranks)
        self._store = store
        self._codec = codec
        self._timeout_s = CHECKPOINT_TIMEOUT_S.read()
        self._ends_s = math.inf
        # How long this member waits, at most, without looking whether that is of use. Told to hurry, it ends when a
        # quarter of its time more has passed.
        self._longest_slice_s = CHECKPOINT_ORPHAN_TIMEOUT_S.read() / 4

    def hurry(self, timeout_s: float) -> None:
        """Limits the wait from now on, in all rounds together. Any thread may call it."""
        self._ends_s = time.monotonic() + timeout_s

    def find_gone(self, awaited: Callable[[], list[int]]) -> str:
        """Called from time to time; `awaited` finds the members that this one waits for. Returns, in words, those that
        can no longer come."""
        return ""

    def agree(self, work: Callable[[], Part], decide: Callable[[list[Part]], Any] | None = None) -> Any:
        """Do `work` on every rank, then `decide` on rank 0 from the parts by rank; all ranks return the decision.

        Parts and decision are values that the codec knows. Raises: CheckpointError, the same on all ranks, when either
        failed anywhere; on the failing rank its cause is chained.
        """
        ballot, error = _attempt(work)
        if self._store is None:
            answer, error = _answer(self._ranks, [ballot], error, decide)
        else:
            answer, error = self._meet(self._store, ballot, error, decide)
        if error is not None and not isinstance(error, Exception):
            raise error
        if "problem" in answer:
            raise self._failure(answer) from error
        return answer["value"]

    def _meet(
        self,
        store: Store,
        ballot: dict[str, Any],
        error: BaseException | None,
        decide: Callable[[list[Any]], Any] | None,
    ) -> tuple[dict[str, Any], BaseException | None]:
        meeting = store.add(counter(self.rank), 1)
        own_ballot = ballot_key(meeting, self.rank)
        store.set(own_ballot, self._codec.pack(ballot))
        if self.rank == 0:
            ballots = [ballot_key(meeting, rank) for rank in range(self.size)]
            try:
                self._wait(store, ballots, self._timeout_s, lambda: self._absent(store, meeting))
                read = list(map(self._codec.unpack, _read(store, ballots)))
            except CheckpointError as gone:
                read, error = [describe(gone)], gone
            except StoreTimeoutError as timeout:
                late = [self._ranks[member] for member in self._absent(store, meeting)]
                problem = f"ranks {late} did not come within {self._patience(self._timeout_s)}."
                read, error = [{"problem": problem, "remedy": _LATE, "kind": ""}], timeout
            answer, error = _answer(self._ranks, read, error, decide)
            # All members of this meeting have read the answer of the last one.
            store.delete_key(answer_key(meeting - 1))
            answer = self._codec.unpack(
                store.compare_set(answer_key(meeting), b"", self._codec.pack(answer))  # unless it was given up
            )
        else:
            try:
                # Rank 0 may come as late as this rank may wait, and then wait itself.
                self._wait(store, [answer_key(meeting)], 2 * self._timeout_s, lambda: [0])
                answer = self._codec.unpack(store.get(answer_key(meeting)))
            except CheckpointError as gone:
                # Only some members check whether rank 0 is alive; all are told.
                agreed = store.compare_set(answer_key(meeting), b"", self._codec.pack(describe(gone)))
                answer, error = self._codec.unpack(agreed), gone
            except StoreTimeoutError as timeout:
                problem = f"rank {self._ranks[0]} did not answer within {self._patience(2 * self._timeout_s)}."
                answer, error = {"problem": problem, "remedy": _LATE, "kind": ""}, timeout
        store.delete_key(own_ballot)
        return answer, error

    def _absent(self, store: Store, meeting: int) -> list[int]:
        return absent(store, ballot_key(meeting, ""), range(self.size))

    def _wait(self, store: Store, keys: Sequence[str], timeout_s: float, awaited: Callable[[], list[int]]) -> None:
        def check() -> None:
            if time.monotonic() >= self._ends_s:
                raise StoreTimeoutError("wait", "there is no time left for it.")
            problem = self.find_gone(awaited)
            if problem and not store.check(keys):
                raise CheckpointError(self.operation, problem, _GONE)

        in_slices(keys, lambda slice_s: store.wait(keys, slice_s), timeout_s, check, self._longest_slice_s)

    def _patience(self, timeout_s: float) -> str:
        return f"{timeout_s:g} s" if self._ends_s == math.inf else "the time that was left"

    def _failure(self, answer: dict[str, Any]) -> CheckpointError:
        kind = CheckpointCorruptError if answer["kind"] == CheckpointCorruptError.__name__ else CheckpointError
        own_rank = None if self._store is None else self._ranks[self.rank]
        return kind(self.operation, answer["problem"], answer["remedy"], rank=own_rank)


def counter(rank: int) -> str:
    """The key that counts the meetings that `rank` has come to."""
    return f"meetings/{rank}"


def ballot_key(meeting: int, rank: int | str) -> str:
    return f"{meeting}/{rank}"


def _read(store: Store, ballots: Sequence[str]) -> Iterator[bytes]:
    for first in range(0, len(ballots), _BALLOTS_AT_ONCE):
        keys = ballots[first : first + _BALLOTS_AT_ONCE]
        try:
            yield from store.multi_get(keys)
        except StoreLimitError:  # together they are too large for one answer
            yield from map(store.get, keys)


def answer_key(meeting: int) -> str:
    return f"{meeting}/answer"


DEAD = "dead"
"""The key that is there once a rank will come to no more meetings."""


def speak_for(rank: int, store: Store, problem: str, remedy: str) -> None:
    """Take the part of a rank that has died at the meeting where it was, or the next: a failure, for all."""
    store.set(DEAD, b"")
    where = f"on rank {rank}: "
    last = store.add(counter(rank), 0)
    for meeting in (last, last + 1):
        # As a ballot it comes to rank 0, who says where it is from.
        key = ballot_key(meeting, rank) if rank else answer_key(meeting)
        failure = {"problem": problem if rank else where + problem, "remedy": remedy, "kind": ""}
        store.compare_set(key, b"", PLAIN.pack(failure))


_GONE = "Look for their last error in their logs; what was there before is as it was."
_LATE = f"Look for its error in its log; a slow disk may need a larger {CHECKPOINT_TIMEOUT_S.name}."


def _attempt(work: Callable[[], Any]) -> tuple[dict[str, Any], BaseException | None]:
    """A ballot: the value, or what went wrong, with the error itself."""
    try:
        return {"value": work()}, None
    except BaseException as error:  # noqa: BLE001  others wait: this rank tells them before it raises
        return describe(error), error


def describe(error: BaseException) -> dict[str, Any]:
    """A ballot that says what went wrong."""
    if isinstance(error, DisttrainError):
        return {"problem": error.problem, "remedy": error.remedy, "kind": type(error).__name__}
    remedy = _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return {"problem": f"{type(error).__name__}: {error}.", "remedy": remedy, "kind": ""}


def _answer(
    ranks: Sequence[int],
    ballots: Sequence[dict[str, Any]],
    error: BaseException | None,
    decide: Callable[[list[Any]], Any] | None,
) -> tuple[dict[str, Any], BaseException | None]:
    """The answer for all ranks: the first failure and who else failed, or the decision."""
    failed = [rank for rank, ballot in enumerate(ballots) if "problem" in ballot]
    if not failed:
        if decide is None:
            return {"value": None}, error
        return _attempt(lambda: decide([ballot["value"] for ballot in ballots]))
    first = ballots[failed[0]]
    if len(ranks) < 2 or len(ballots) < len(ranks) or len(failed) == len(ranks):
        return first, error
    where, *also = [ranks[member] for member in failed]
    others = f" Ranks {also} failed too." if also else ""
    return {**first, "problem": f"on rank {where}: {first['problem']}{others}"}, error
