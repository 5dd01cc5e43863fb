"""Messages with both their ends, each put together when it is asked for. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disttrain.flight_recorder.analysis.tracks import NO_PEER, Track, TrackKey
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import RECEIVE, SEND, Record


@dataclass(frozen=True, slots=True)
class Message:
    """One message: the record of either end, None where its rank has not issued it or its ring has lost it.

    `is_absent` says that an end is missing for sure: its rank's dump counts fewer messages on this channel.
    """

    group_name: str
    number: int
    src_rank: int
    dst_rank: int
    send: Record | None
    receive: Record | None
    is_absent: bool


MessageKey = tuple[str, int, int, int]
"""Group name, sender, receiver, number."""


def message_key(rank: int, record: Record) -> MessageKey:
    """The message that `record`, a send or receive of `rank`, is an end of."""
    site = record.site
    peer_rank = NO_PEER if site.peer_rank is None else site.peer_rank
    ends = (rank, peer_rank) if site.operation == SEND else (peer_rank, rank)
    return (site.group_name, *ends, record.sequence)


class Messages:
    """All messages, by `message_key`."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = dumps
        self._tracks: dict[tuple[int, TrackKey], Track] = {}
        self._counts: dict[int, dict[TrackKey, int]] = {}

    def note_track(self, rank: int, key: TrackKey, track: Track) -> None:
        self._tracks[rank, key] = track

    def __getitem__(self, key: MessageKey) -> Message:
        group_name, src_rank, dst_rank, number = key
        send_track, receive_track = self._ends(key)
        send = None if send_track is None else send_track.find(number)
        receive = None if receive_track is None else receive_track.find(number)
        is_absent = False
        if send is None:
            is_absent = src_rank in self._dumps and self._count(src_rank, (group_name, SEND, dst_rank)) < number
        elif receive is None:
            is_absent = dst_rank in self._dumps and self._count(dst_rank, (group_name, RECEIVE, src_rank)) < number
        return Message(group_name, number, src_rank, dst_rank, send, receive, is_absent)

    def unfinished(self) -> list[Message]:
        """The messages of which a known end is not completed, in the order of the ranks' records."""
        places: dict[MessageKey, tuple[int, int]] = {}
        for rank, records in {rank: track.records for (rank, _), track in self._tracks.items()}.items():
            for record in map(records.__getitem__, records.unfinished):
                if record.site.is_message and (key := message_key(rank, record)) not in places:
                    places[key] = self._place(key)
        return [self[key] for key in sorted(places, key=places.__getitem__)]

    def _ends(self, key: MessageKey) -> tuple[Track | None, Track | None]:
        group_name, src_rank, dst_rank, _ = key
        send = self._tracks.get((src_rank, (group_name, SEND, dst_rank)))
        return send, self._tracks.get((dst_rank, (group_name, RECEIVE, src_rank)))

    def _place(self, key: MessageKey) -> tuple[int, int]:
        """The rank and the position of the first record of a message."""
        positions = [
            (rank, track.position(key[3]))
            for rank, track in zip(key[1:3], self._ends(key), strict=True)
            if track is not None
        ]
        return min((rank, position) for rank, position in positions if position is not None)

    def _count(self, rank: int, channel: TrackKey) -> int:
        """The messages that a rank has started on a channel."""
        if rank not in self._counts:
            self._counts[rank] = {
                (channel.group_name, channel.operation, channel.peer_rank): channel.last_sequence
                for channel in reversed(self._dumps[rank].channels)
            }
        return self._counts[rank].get(channel, 0)
