"""How ranks come to one outcome: each does its part, rank 0 decides, all return the same or raise the same.

Ballots and answers go through the world's store, not through collectives: a rank that fails can still say so, a rank
that has gone is named, and nothing on a GPU's stream is touched. A round costs each rank four requests.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from disttrain.errors import CheckpointCorruptError, CheckpointError, DisttrainError, StoreTimeoutError
from disttrain.process_group import World, current_world, is_initialized
from disttrain.process_group.packing import pack, unpack
from disttrain.settings import CHECKPOINT_TIMEOUT_S
from disttrain.store import PrefixStore

Part = TypeVar("Part")

_REMEDIES = {
    errno.ENOSPC: "Free some space, or save elsewhere; what was there before is as it was.",
    errno.EDQUOT: "Free some of the quota, or save elsewhere; what was there before is as it was.",
    errno.EACCES: "Check the owner and the mode of the folder.",
    errno.EPERM: "Check the owner and the mode of the folder.",
    errno.ENOENT: "All nodes must see the same folder, and nobody may remove it meanwhile.",
    errno.EROFS: "Save to a file system that may be written to.",
}


class Council:
    """The ranks that save or load together: all of the default world, or this process alone where there is none."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.world: World | None = current_world(operation) if is_initialized() else None
        self.rank = 0 if self.world is None else self.world.rank
        self.size = 1 if self.world is None else self.world.world_size
        self._timeout_s = CHECKPOINT_TIMEOUT_S.read()

    def agree(self, work: Callable[[], Part], decide: Callable[[list[Part]], Any] | None = None) -> Any:
        """Do `work` on every rank, then `decide` on rank 0 from the parts by rank; all ranks return the decision.

        Parts and decision are values that `packing` knows. Raises: CheckpointError, the same on all ranks, when either
        failed anywhere; on the failing rank its cause is chained.
        """
        ballot, error = _attempt(work)
        if self.world is None:
            answer, error = _answer(1, [ballot], error, decide)
        else:
            answer, error = self._meet(self.world, ballot, error, decide)
        if error is not None and not isinstance(error, Exception):
            raise error
        if "problem" in answer:
            raise self._failure(answer) from error
        return answer["value"]

    def _meet(
        self,
        world: World,
        ballot: dict[str, Any],
        error: BaseException | None,
        decide: Callable[[list[Any]], Any] | None,
    ) -> tuple[dict[str, Any], BaseException | None]:
        store = PrefixStore("checkpoint", world.store)
        meeting = store.add(f"meetings/{self.rank}", 1)
        ballots = [f"{meeting}/{rank}" for rank in range(self.size)]
        store.set(ballots[self.rank], pack(ballot))
        if self.rank == 0:
            try:
                store.wait(ballots, self._timeout_s)
                read = [unpack(store.get(key)) for key in ballots]
            except StoreTimeoutError as timeout:
                absent = [rank for rank, key in enumerate(ballots) if not store.check([key])]
                problem = f"ranks {absent} did not come within {self._timeout_s:g} s."
                read, error = [{"problem": problem, "remedy": _LATE, "kind": ""}], timeout
            answer, error = _answer(self.size, read, error, decide)
            # Whoever came to this meeting has read the last one's answer.
            store.delete_key(f"{meeting - 1}/answer")
            store.set(f"{meeting}/answer", pack(answer))
        else:
            try:
                # Rank 0 may come as late as this rank may wait, and then wait itself.
                store.wait([f"{meeting}/answer"], 2 * self._timeout_s)
                answer = unpack(store.get(f"{meeting}/answer"))
            except StoreTimeoutError as timeout:
                problem = f"rank 0 did not answer within {2 * self._timeout_s:g} s."
                answer, error = {"problem": problem, "remedy": _LATE, "kind": ""}, timeout
        store.delete_key(ballots[self.rank])
        return answer, error

    def _failure(self, answer: dict[str, Any]) -> CheckpointError:
        kind = CheckpointCorruptError if answer["kind"] == CheckpointCorruptError.__name__ else CheckpointError
        own_rank = None if self.world is None else self.rank
        return kind(self.operation, answer["problem"], answer["remedy"], rank=own_rank)


_LATE = f"Look for its error in its log; a slow disk may need a larger {CHECKPOINT_TIMEOUT_S.name}."


def _attempt(work: Callable[[], Any]) -> tuple[dict[str, Any], BaseException | None]:
    """A ballot: the value, or what went wrong, with the error itself."""
    try:
        return {"value": work()}, None
    except BaseException as error:  # noqa: BLE001  others wait: this rank tells them before it raises
        return _describe(error), error


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, DisttrainError):
        return {"problem": error.problem, "remedy": error.remedy, "kind": type(error).__name__}
    remedy = _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return {"problem": f"{type(error).__name__}: {error}.", "remedy": remedy, "kind": ""}


def _answer(
    num_ranks: int,
    ballots: Sequence[dict[str, Any]],
    error: BaseException | None,
    decide: Callable[[list[Any]], Any] | None,
) -> tuple[dict[str, Any], BaseException | None]:
    """What all ranks are told: the first failure and who else failed, or the decision."""
    failed = [rank for rank, ballot in enumerate(ballots) if "problem" in ballot]
    if not failed:
        if decide is None:
            return {"value": None}, error
        return _attempt(lambda: decide([ballot["value"] for ballot in ballots]))
    first = ballots[failed[0]]
    if num_ranks < 2 or len(ballots) < num_ranks or len(failed) == num_ranks:
        return first, error
    others = f" Ranks {failed[1:]} failed too." if failed[1:] else ""
    return {**first, "problem": f"on rank {failed[0]}: {first['problem']}{others}"}, error
