"""Counts how many messages must be buffered, if a send blocks its rank until there is room.

A receiver takes a message when it computes with it, together with all earlier ones of that sender. The ranks are
simulated with more and more room until all come to their end. Nothing depends on chance, so one simulation decides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from disttrain.pipelining.schedule.action import RECEIVES, Action
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.player import Link, Player
from disttrain.pipelining.schedule.schedule import Schedule


def slots_needed(schedule: Schedule) -> int:
    """The least number of slots per link with which a lowered and verified schedule comes to its end; 1 at least."""
    enough = 1
    while not _ends(schedule, enough):
        enough *= 2
    # With more room a schedule comes at least as far. So the least is between the last two.
    return bisect_left(range(enough), True, enough // 2 + 1, key=lambda num_slots: _ends(schedule, num_slots))


def _ends(schedule: Schedule, num_slots: int) -> bool:
    player = _Slotted(schedule, num_slots)
    player.play()
    return all(map(player.is_done, range(schedule.num_ranks)))


class _Slotted(Player):
    """A send waits for a free slot of its link; the receiver frees slots as it takes messages."""

    def __init__(self, schedule: Schedule, num_slots: int) -> None:
        super().__init__(schedule, Costs())
        self._num_slots = num_slots
        self._num_sent: defaultdict[Link, int] = defaultdict(int)
        self._num_taken: defaultdict[Link, int] = defaultdict(int)
        # Of each kind and stage, the link that an input comes by; None for what is computed on this rank.
        self._links = {
            kind: [
                [self.link_of(each.other_end) if each.op in RECEIVES else None for each in needed]
                for needed in of_stages
            ]
            for kind, (of_stages, _) in self.dependencies.items()
        }

    def send(self, rank: int, send: Action) -> bool:
        link = self.link_of(send)
        # In the end a rank takes what is left, as tied gradients.
        if self._num_sent[link] - self._num_taken[link] >= self._num_slots and not self.is_done(link[1]):
            return False
        self._num_sent[link] += 1
        # Not a time, but the message's index among those of the link.
        self.arrivals_of(send)[send.microbatch] = self._num_sent[link]
        self.wake(link[1])
        return True

    def advance(self, rank: int, now_s: float) -> None:
        was_done = self.is_done(rank)
        super().advance(rank, now_s)
        if self.is_done(rank) and not was_done:
            for sender in range(self.schedule.num_ranks):
                self.wake(sender)

    def ready_s(self, action: Action) -> float | None:
        """Takes what the action computes with, one after the other, as far as it has been sent."""
        for part in action.parts:
            links = self._links[part.op][part.stage]
            for times, link in zip(self.inputs[part.op][part.stage], links, strict=True):
                number = times.get(part.microbatch)
                if number is None:
                    return None
                if link is not None and number > self._num_taken[link]:
                    self._num_taken[link] = int(number)
                    self.wake(link[0])
        return 0
