"""Finds replays of recorded steps that do not get on within the timeout of a group, which no transport watches.

A transport watches the operations that the host hands to it. Those of a graph are launched without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disttrain.process_group.watching.observer import Call

if TYPE_CHECKING:
    from disttrain.errors import DisttrainError
    from disttrain.flight_recorder.record.listing import Listing
    from disttrain.process_group.interfaces import GroupLike

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InReplay:
    """The operation that a device has come to last in a replay that has not ended."""

    call: Call
    replay: int
    graph: int

    @property
    def group(self) -> GroupLike:
        return self.call.group

    def failure(self) -> DisttrainError:
        """The error of an operation that has not ended in time."""
        return self.call.failure(TimeoutError(f"in replay {self.replay} of step graph {self.graph}"))


@dataclass
class _Seen:
    progress: Sequence[int] = ()
    since_s: float = 0.0


@dataclass
class ReplayLimits:
    """Watches the replays of a rank. Pure; call `look` from time to time."""

    _seen: dict[int, _Seen] = field(default_factory=dict)

    def look(self, listings: Sequence[Listing], now_s: float) -> list[tuple[Listing, InReplay]]:
        """The replays in which nothing has changed for the timeout of the group of the operation that they are in;
        each once."""
        overdue = []
        for listing in listings:
            progress = listing.progress()
            if progress is None or listing.failure is not None:
                continue
            seen = self._seen.setdefault(listing.number, _Seen())
            if seen.progress != progress or progress[0] >= listing.num_replays:
                seen.progress, seen.since_s = progress, now_s
                continue
            within = operation_within(listing, progress)
            if within is not None and now_s - seen.since_s >= within.group.timeout_s:
                seen.since_s = now_s
                overdue.append((listing, within))
        self._seen = {
            listing.number: self._seen[listing.number] for listing in listings if listing.number in self._seen
        }
        return overdue


def operation_within(listing: Listing, progress: Sequence[int]) -> InReplay | None:
    """The operation that the device has come to last in the replay that it is in; None where it has come to none."""
    ended, *came = progress
    replay = ended + 1
    come = [index for index, last in enumerate(came[: len(listing.called)]) if last >= replay]
    if not come:
        return None
    part, count, operation, action, module = listing.called[come[-1]]
    # By what has been launched since: `before` is that of the latest replay.
    num_behind = listing.num_replays - replay
    sequence = part.before + count - num_behind * part.num_calls if part.is_collective else 0
    peer_rank = part.peer_rank
    return InReplay(
        Call(operation, part.group, sequence, (), (), peer_rank, (), action, module), replay, listing.number
    )


def end_overdue(listing: Listing, within: InReplay) -> None:
    """End the group of an operation that has not ended in time, so that the device goes on; the next replay raises.

    In a thread of its own, since the transport may wait for its graphs.
    """
    error = within.failure()
    listing.failure = error
    _log.error("%s", str(error))
    threading.Thread(
        target=within.group.end, args=(str(error),), name="disttrain flight replay limit", daemon=True
    ).start()
