"""Deals tensors of which several ranks hold each part to these ranks, by bytes. Pure arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Dealt(NamedTuple):
    """The holders of a tensor's parts that write them: `num_writers` in a row from position `first` on, in a circle.

    The pieces of a part go to them in turn.
    """

    first: int
    num_writers: int


class Hand(NamedTuple):
    """A tensor to deal: its name, and the bytes and number of the pieces of its largest part."""

    name: str
    piece_bytes: int
    num_pieces: int


def deal(hands: Sequence[Hand], num_holders: int, start: int, loads: Mapping[int, int]) -> dict[str, Dealt]:
    """Deals the largest first, each to the holder with the fewest bytes; pieces go to the holders after it, too.

    `start` is the position that comes first where several have equally few; `loads` are the bytes that some have
    already, by position. No list of the holders is made.
    """
    dealt = {}
    load_bytes = {(position - start) % num_holders: num_bytes for position, num_bytes in loads.items()}
    least = [(num_bytes, position) for position, num_bytes in load_bytes.items()]
    heapq.heapify(least)
    untouched = 0
    for hand in sorted(hands, key=lambda hand: (-hand.piece_bytes, hand.name)):
        while untouched in load_bytes:
            untouched += 1
        if untouched < num_holders:
            first = untouched
        else:
            while load_bytes[least[0][1]] != least[0][0]:
                heapq.heappop(least)
            first = least[0][1]
        dealt[hand.name] = Dealt((start + first) % num_holders, min(hand.num_pieces, num_holders))
        for piece in range(hand.num_pieces):
            position = (first + piece) % num_holders
            load_bytes[position] = load_bytes.get(position, 0) + hand.piece_bytes
            heapq.heappush(least, (load_bytes[position], position))
    return dealt
