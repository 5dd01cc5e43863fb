"""The schedule comes to its end on transports that buffer nothing.

The ranks are simulated under the strictest rules that a transport may have. A send blocks its rank until the message is
taken. A message is taken when both ends have reached it and all earlier ones of the pair have been taken. A receive
only makes room; the computation that uses it waits. These rules leave nothing to chance, so one simulation decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import RECEIVES, SENDS, Action
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.dependencies import inputs_of
from disttrain.pipelining.schedule.player import Player
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
        # For each rank and peer, the messages that the rank has reached; for each message, its index among these.
        self._reached: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        self._number: dict[Action, int] = {}

    def send(self, rank: int, send: Action) -> bool:
        return self._reach(send)

    def receive(self, rank: int, receive: Action) -> None:
        self._reach(receive)

    def _reach(self, end: Action) -> bool:
        """True once the message is through: both ranks have reached it, and so all before it, as sends wait."""
        rank, peer = self.link_of(end)
        own_list, peer_list = self._reached[rank, peer], self._reached[peer, rank]
        if end not in self._number:
            self._number[end] = len(own_list)
            own_list.append(end)
            if len(own_list) <= len(peer_list):
                for each in (end, peer_list[len(own_list) - 1]):
                    if each.op in RECEIVES:
                        self.times_of(each)[each.microbatch] = 0
                self.wake(peer)
                self.wake(rank)
        return self._number[end] < len(peer_list)

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
