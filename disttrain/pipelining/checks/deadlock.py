"""The schedule comes to its end on transports that buffer nothing.

The ranks are simulated under the strictest rules that a transport may have. A send blocks its rank until the message is
taken. A message is taken when both ends have reached it and all earlier ones of the pair have been taken. A receive
only makes room; the computation that uses it waits. These rules leave nothing to chance, so one simulation decides.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import RECEIVES, SENDS, Action
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.dependencies import inputs_of
from disttrain.pipelining.schedule.player import Link, Player
from disttrain.pipelining.schedule.schedule import Schedule


def check_deadlock(schedule: Schedule) -> Iterator[Problem]:
    player = _Unbuffered(schedule, Costs())
    player.play()
    blocked = [
        (rank, position, schedule.ranks[rank][position])
        for rank, position in enumerate(player.positions)
        if not player.is_done(rank)
    ]
    if blocked:
        rank, position, _ = blocked[0]
        waits = "; ".join(
            f"rank {rank} at action {position}, {action}, for {player.cause(action)}"
            for rank, position, action in blocked
        )
        yield Problem(
            f"All ranks that are not done wait for each other: {waits}.",
            "Order the computations so that each can follow what it uses, then call lower for the messages.",
            rank,
            position,
        )


class _Unbuffered(Player):
    """A send waits until its receiver has come to the message too."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        super().__init__(schedule, costs)
        # For each rank and peer, how many of their messages the rank has reached, and which of these the peer has not.
        self._num_reached: defaultdict[Link, int] = defaultdict(int)
        self._open: defaultdict[Link, deque[Action]] = defaultdict(deque)
        # Of each rank, the position of the last send that it has reached, and its number between the two ranks.
        self._sending = [(-1, 0)] * schedule.num_ranks

    def send(self, rank: int, send: Action) -> bool:
        """True once the message is through: both ranks have reached it, and so all before it, as sends wait."""
        link = self.link_of(send)
        position, number = self._sending[rank]
        if position != self.positions[rank]:
            number = self._reach(link, send)
            self._sending[rank] = self.positions[rank], number
        return number < self._num_reached[link[1], link[0]]

    def receive(self, rank: int, receive: Action) -> None:
        self._reach(self.link_of(receive), receive)

    def _reach(self, link: Link, end: Action) -> int:
        """Returns the message's number between the two ranks."""
        rank, peer = link
        number = self._num_reached[link]
        self._num_reached[link] += 1
        if waiting := self._open[peer, rank]:
            for each in (end, waiting.popleft()):
                if each.op in RECEIVES:
                    self.times_of(each)[each.microbatch] = 0
            self.wake(peer)
            self.wake(rank)
        else:
            self._open[link].append(end)
        return number

    def cause(self, action: Action) -> str:
        """The reason why a rank does not go on from `action`."""
        if action.op in SENDS:
            return (
                f"rank {self.link_of(action)[1]} to reach {action.other_end}, or what comes before it between the two"
            )
        missing = next(
            needed
            for part in action.parts
            for needed in inputs_of(self.schedule, part, by_message=self.schedule.has_messages)
            if needed.microbatch not in self.times_of(needed)
        )
        return f"{missing} on rank {self.home[missing.stage]}"
