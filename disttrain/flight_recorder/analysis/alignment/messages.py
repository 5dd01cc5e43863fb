"""Messages with both their ends, each put together when it is asked for. Pure and torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from disttrain.flight_recorder.analysis.alignment.tracks import NO_PEER, Track, TrackKey
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import RECEIVE, SEND, CallSite, Record


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
    return (*_channel(rank, record.site), record.sequence)


def _channel(rank: int, site: CallSite) -> tuple[str, int, int]:
    """The group, the sender and the receiver."""
    peer_rank = NO_PEER if site.peer_rank is None else site.peer_rank
    ends = (rank, peer_rank) if site.operation == SEND else (peer_rank, rank)
    return (site.group_name, *ends)


def _sites(track: Track) -> set[int]:
    """The numbers of all its call sites."""
    return set(map(track.records.site_numbers.__getitem__, track.positions))


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

    def first_unlike(self, differ: Callable[[CallSite, CallSite], bool]) -> list[Message]:
        """Of each channel the first message that a known end has not completed and of which send and receive `differ`,
        in the order of the ranks' records. What follows it in its channel may be shifted."""
        places: dict[MessageKey, tuple[int, int]] = {}
        for channel in self._unfinished_channels():
            key = self._first_unlike(channel, differ)
            if key is not None:
                places[key] = self._place(key)
        return [self[key] for key in sorted(places, key=places.__getitem__)]

    def _unfinished_channels(self) -> Iterable[MessageKey]:
        """A key for each channel of which some end has not completed a message, with 0 for the message's number."""
        channels: dict[MessageKey, None] = {}
        for rank, records in {rank: track.records for (rank, _), track in self._tracks.items()}.items():
            numbers = set(map(records.site_numbers.__getitem__, records.unfinished))
            for site in map(records.sites.__getitem__, sorted(numbers)):
                if site.is_message:
                    channels[(*_channel(rank, site), 0)] = None
        return channels

    def _first_unlike(self, channel: MessageKey, differ: Callable[[CallSite, CallSite], bool]) -> MessageKey | None:
        send, receive = self._ends(channel)
        if send is None or receive is None:
            return None
        differing = {
            (sent, received)
            for sent, received in itertools.product(_sites(send), _sites(receive))
            if differ(send.records.sites[sent], receive.records.sites[received])
        }
        if not differing:
            return None  # In most channels all messages are alike, and need not be looked at.
        for number in sorted({*send.unfinished(), *receive.unfinished()}):
            sent, received = send.position(number), receive.position(number)
            if sent is None or received is None:
                continue
            if (send.records.site_numbers[sent], receive.records.site_numbers[received]) in differing:
                return (*channel[:3], number)
        return None

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
