"""The schedule comes to its end on transports that buffer nothing.

The ranks are played under the strictest rules that a transport may have: a send holds its rank until the message is
taken; a message is taken when both ends have reached it and all earlier ones of the pair are through; a receive only
makes room, and whoever computes with it waits. Then nothing depends on chance, so one play decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import COMPUTE, INPUT_GRADIENTS, MESSAGES, SENDS, Action, Op
from disttrain.pipelining.schedule.schedule import Schedule


def check_deadlock(schedule: Schedule) -> Iterator[Problem]:
    play = _Play(schedule)
    while sum(map(play.advance, range(schedule.num_ranks))):  # a sum: every rank gets its turn
        pass
    blocked = [
        (rank, position, actions[position])
        for rank, (position, actions) in enumerate(zip(play.positions, schedule.ranks, strict=True))
        if position < len(actions)
    ]
    if blocked:
        rank, position, _ = blocked[0]
        waits = "; ".join(
            f"rank {rank} at action {position}, {action}, for {play.cause(rank, action)}"
            for rank, position, action in blocked
        )
        yield Problem(
            f"All ranks that are not done wait for each other: {waits}.",
            "Order the computations so that each can follow what it uses, then call lower for the messages.",
            rank,
            position,
        )


class _Play:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.home = schedule.placement.ranks
        self.positions = [0] * schedule.num_ranks
        self.done: set[Action] = set()
        # Of each rank and peer, how many messages it has reached; of each end, which one it is.
        self.num_reached: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.number: dict[Action, int] = {}

    def advance(self, rank: int) -> bool:
        """As far as it goes; False when that is nowhere."""
        actions = self.schedule.ranks[rank]
        before = self.positions[rank]
        while self.positions[rank] < len(actions) and self._step(actions[self.positions[rank]]):
            self.positions[rank] += 1
        return self.positions[rank] > before

    def cause(self, rank: int, action: Action) -> str:
        if action.op in SENDS:
            assert action.peer is not None
            peer = self.home[action.peer]
            return f"rank {peer} to reach {action.other_end}, or what comes before it between the two"
        missing = next(needed for part in action.parts for needed in self._inputs(part) if not self._is_there(needed))
        return f"{missing} on rank {self.home[missing.stage]}"

    def _step(self, action: Action) -> bool:
        if action.op in MESSAGES:
            self._reach(action)
            return action.op not in SENDS or self._is_through(action)
        if action.op in COMPUTE:
            if not all(self._is_there(needed) for part in action.parts for needed in self._inputs(part)):
                return False
            for part in action.parts:
                self.done.add(part._replace(op=Op.BACKWARD_INPUT) if part.op is Op.BACKWARD else part)
        return True

    def _reach(self, end: Action) -> None:
        if end not in self.number:
            assert end.peer is not None
            pair = self.home[end.stage], self.home[end.peer]
            self.number[end] = self.num_reached[pair]
            self.num_reached[pair] += 1

    def _is_through(self, end: Action) -> bool:
        """Both ranks have reached it, and so all before it: their lists agree, and sends wait."""
        assert end.peer is not None
        return end in self.number and self.num_reached[self.home[end.peer], self.home[end.stage]] > self.number[end]

    def _is_there(self, needed: Action) -> bool:
        return self._is_through(needed) if needed.op in MESSAGES else needed in self.done

    def _inputs(self, part: Action) -> Iterator[Action]:
        """Computations and receives that `part` uses; without messages in the schedule, others' computations."""
        stage, microbatch = part.stage, part.microbatch
        if part.op is Op.BACKWARD_WEIGHT:
            yield Action(Op.BACKWARD_INPUT, stage, microbatch)
            return
        backward = part.op in INPUT_GRADIENTS
        if backward:
            yield Action(Op.FORWARD, stage, microbatch)
        computed, received = (Op.BACKWARD_INPUT, Op.RECV_B) if backward else (Op.FORWARD, Op.RECV_F)
        for other in (self.schedule.targets if backward else self.schedule.sources)[stage]:
            if self.schedule.has_messages and self.home[other] != self.home[stage]:
                yield Action(received, stage, microbatch, other)
            else:
                yield Action(computed, other, microbatch)
