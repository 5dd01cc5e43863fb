"""How far senders must be able to run ahead of receivers, where a send holds its rank until there is room.

A receiver takes a message when it computes with it, and all earlier ones of that sender with it. The ranks are played
with ever more room until all come to their end; since nothing depends on chance, one play decides.
"""

from __future__ import annotations

from collections import defaultdict

from disttrain.pipelining.schedule.action import INPUT_GRADIENTS, RECEIVES, SENDS, Action, Op
from disttrain.pipelining.schedule.schedule import Schedule

Way = tuple[int, int]
"""From which rank to which."""


def slots_needed(schedule: Schedule) -> int:
    """The least number of slots per way with which a lowered and verified schedule comes to its end; 1 at least."""
    num_slots = 1
    while not _Play(schedule, num_slots).ends():
        num_slots += 1
    return num_slots


class _Play:
    def __init__(self, schedule: Schedule, num_slots: int) -> None:
        self.schedule = schedule
        self.num_slots = num_slots
        self.home = schedule.placement.ranks
        self.positions = [0] * schedule.num_ranks
        self.computed: set[Action] = set()
        self.num_sent: defaultdict[Way, int] = defaultdict(int)
        self.num_taken: defaultdict[Way, int] = defaultdict(int)
        # Of each receive, which one of its way it is.
        self.numbers: dict[Action, int] = {}
        counts: defaultdict[Way, int] = defaultdict(int)
        for actions in schedule.ranks:
            for action in actions:
                if action.op in RECEIVES:
                    counts[self.way(action)] += 1
                    self.numbers[action] = counts[self.way(action)]

    def way(self, message: Action) -> Way:
        assert message.peer is not None
        here, there = self.home[message.stage], self.home[message.peer]
        return (here, there) if message.op in SENDS else (there, here)

    def ends(self) -> bool:
        while sum(map(self.advance, range(self.schedule.num_ranks))):
            pass
        return all(place == len(self.schedule.ranks[rank]) for rank, place in enumerate(self.positions))

    def advance(self, rank: int) -> int:
        actions, before = self.schedule.ranks[rank], self.positions[rank]
        while self.positions[rank] < len(actions) and self.step(actions[self.positions[rank]]):
            self.positions[rank] += 1
        if self.positions[rank] == len(actions):
            # In the end it takes what is left, as tied gradients.
            for way, num_sent in self.num_sent.items():
                if way[1] == rank:
                    self.num_taken[way] = num_sent
        return self.positions[rank] - before

    def step(self, action: Action) -> bool:
        if action.op in SENDS:
            way = self.way(action)
            if self.num_sent[way] - self.num_taken[way] >= self.num_slots:
                return False
            self.num_sent[way] += 1
        for part in action.parts:
            if part.op is Op.FORWARD or part.op in INPUT_GRADIENTS:
                if not self.take(part):
                    return False
                self.computed.add(self.done(part))
        return True

    def take(self, part: Action) -> bool:
        """All that it computes with; False when something has not been sent, or computed here."""
        is_forward = part.op is Op.FORWARD
        others = (self.schedule.sources if is_forward else self.schedule.targets)[part.stage]
        received = Op.RECV_F if is_forward else Op.RECV_B
        for other in others:
            if self.home[other] == self.home[part.stage]:
                if self.done(part._replace(stage=other)) not in self.computed:
                    return False
                continue
            receive = Action(received, part.stage, part.microbatch, other)
            way, number = self.way(receive), self.numbers[receive]
            if self.num_sent[way] < number:
                return False
            self.num_taken[way] = max(self.num_taken[way], number)
        return True

    @staticmethod
    def done(part: Action) -> Action:
        return Action(Op.FORWARD if part.op is Op.FORWARD else Op.BACKWARD_INPUT, part.stage, part.microbatch)
