"""Finds the ranks without which an operation cannot end. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from disttrain.flight_recorder.analysis.alignment.collectives import Collective
from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.alignment.messages import message_key
from disttrain.flight_recorder.record.record import Record, State


class Missing:
    """Finds the ranks without which operations cannot end. All who wait in one collective get the same tuple."""

    def __init__(self, matched: Match, gone: AbstractSet[int]) -> None:
        self.gone = gone
        self._matched = matched
        # Of each collective, those whose devices have not come to it, and all that are missing.
        self._of_collectives: dict[tuple[str, int], tuple[set[int], tuple[int, ...]]] = {}

    def of(self, rank: int, record: Record) -> tuple[int, ...]:
        """The ranks that `rank` waits for in `record`."""
        if record.is_queued:
            return ()  # It waits for the work that is queued before it.
        if record.state is not State.CONNECTING and record.site.is_message:
            return self._of_message(rank, record)
        key = (record.site.group_name, record.sequence)
        collective = self._matched.collectives[key[0]][key[1]]
        if key not in self._of_collectives:
            queued = {other for other, its in collective.records.items() if its.is_queued}
            self._of_collectives[key] = queued, self._of_collective(collective, queued)
        queued, missing = self._of_collectives[key]
        return missing if rank not in queued else self._of_collective(collective, queued - {rank})

    def _of_collective(self, collective: Collective, queued: AbstractSet[int]) -> tuple[int, ...]:
        missing = collective.absent + collective.unknown
        gone = {rank for rank in self.gone & collective.records.keys() if _is_under_way(collective.records[rank])}
        return missing + tuple(sorted((gone | queued).difference(missing)))

    def _of_message(self, rank: int, record: Record) -> tuple[int, ...]:
        message = self._matched.messages[message_key(rank, record)]
        peer_rank = message.dst_rank if rank == message.src_rank else message.src_rank
        is_alone = message.send is None or message.receive is None
        other = message.receive if rank == message.src_rank else message.send
        if other is not None and (other.is_queued or (peer_rank in self.gone and _is_under_way(other))):
            return (peer_rank,)
        is_missing = is_alone and (message.is_absent or peer_rank not in self._matched.dumps)
        return (peer_rank,) if is_missing else ()


def _is_under_way(record: Record) -> bool:
    return record.state in (State.ENQUEUED, State.CONNECTING)
