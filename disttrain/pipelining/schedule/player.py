"""Plays a schedule: each rank does its actions in order, each one as soon as all that it uses has come. Pure.

Subclasses answer further questions: does the schedule end if nothing is buffered (`checks/deadlock.py`), how many
messages must be buffered (`slots.py`), when does each action happen (`simulator.py`), which computations fill the time
that a rank would wait (`fill_weights.py`). They differ in how a message travels, and in what a rank may do next.
"""

from __future__ import annotations

import heapq

from disttrain.pipelining.schedule.action import COMPUTE, OTHER_END, RECEIVES, SENDS, Action, Op
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.dependencies import as_input, dependencies
from disttrain.pipelining.schedule.schedule import Schedule

Link = tuple[int, int]
"""From which rank to which."""
Times = dict[int | None, float]
"""When one stage had computed something, or received it: by microbatch."""


class Player:
    """One play. Outputs travel by themselves, as soon as they are there, unless the schedule has messages."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.home = schedule.placement.ranks
        self.positions = [0] * schedule.num_ranks
        self.free_s: list[float] = [0] * schedule.num_ranks
        self.link_free_s: dict[Link, float] = {}
        # By the kind of a computation or receive, its stage, and the stage that it receives from.
        self._times: dict[tuple[Op, int, int | None], Times] = {}
        # What may let a rank go on, and when.
        self._wakes: list[tuple[float, int]] = [(0, rank) for rank in range(schedule.num_ranks)]
        self._awake = set(self._wakes)
        # Of each kind of message, whatever its microbatch, the seconds on its link, and the arrivals.
        self._ways: dict[tuple[Op, int, int | None], tuple[float, Times]] = {}
        self.dependencies = dependencies(schedule.placement, schedule.wiring)
        self.inputs = {
            kind: [list(map(self.times_of, needed)) for needed in of_stages]
            for kind, (of_stages, _) in self.dependencies.items()
        }
        self._computed = {
            kind: [self.times_of(as_input(Action(kind, stage))) for stage in range(schedule.num_stages)]
            for kind in self.inputs
        }
        self._compute_s = {
            kind: [costs.of(Action(kind, stage)) for stage in range(schedule.num_stages)] for kind in self.inputs
        }

    def play(self) -> None:
        """Let all ranks go on until none can."""
        while self._wakes:
            wake = heapq.heappop(self._wakes)
            self._awake.discard(wake)
            self.advance(wake[1], wake[0])

    def wake(self, rank: int, now_s: float = 0) -> None:
        """Then something is there that the rank may wait for."""
        wake = (now_s, rank)
        if wake not in self._awake:
            self._awake.add(wake)
            heapq.heappush(self._wakes, wake)

    def is_done(self, rank: int) -> bool:
        """True when the rank has done all its actions."""
        return self.positions[rank] == len(self.schedule.ranks[rank])

    def times_of(self, action: Action) -> Times:
        """Returns when this computation or receive was over, by microbatch."""
        return self._times.setdefault((action.op, action.stage, action.peer), {})

    def arrivals_of(self, send: Action) -> Times:
        """Returns when the receive at the message's other end was over, by microbatch."""
        assert send.peer is not None
        return self._times.setdefault((OTHER_END[send.op], send.peer, send.stage), {})

    def link_of(self, send: Action) -> Link:
        """From which rank to which the message goes."""
        assert send.peer is not None
        return self.home[send.stage], self.home[send.peer]

    def advance(self, rank: int, now_s: float) -> None:
        """Let the rank do its next actions, even those that begin later than now, since its order is fixed."""
        actions, positions, step = self.schedule.ranks[rank], self.positions, self.step
        while positions[rank] < len(actions) and step(rank, actions[positions[rank]]):
            positions[rank] += 1

    def step(self, rank: int, action: Action) -> bool:
        """Do the action; False when it waits for something, which will wake the rank."""
        if action.op in COMPUTE:
            ready_s = self.ready_s(action)
            if ready_s is None:
                return False
            self.compute(rank, action, max(self.free_s[rank], ready_s))
        elif action.op in SENDS:
            return self.send(rank, action)
        elif action.op in RECEIVES:
            self.receive(rank, action)
        return True

    def ready_s(self, action: Action) -> float | None:
        """Returns when all is there that a computation uses; None where some of it is still to come."""
        latest_s: float = 0
        for part in action.parts:
            for times in self.inputs[part.op][part.stage]:
                there_s = times.get(part.microbatch)
                if there_s is None:
                    return None
                latest_s = max(latest_s, there_s)
        return latest_s

    def compute_s(self, action: Action) -> float:
        """Seconds that a computation takes."""
        return self.costs.of(action) if action.children else self._compute_s[action.op][action.stage]

    def compute(self, rank: int, action: Action, start_s: float) -> None:
        """The rank computes from then on."""
        self.free_s[rank] = end_s = start_s + self.compute_s(action)
        has_messages = self.schedule.has_messages
        for part in action.parts:
            self._computed[part.op][part.stage][part.microbatch] = end_s
            for send in () if has_messages else self.dependencies[part.op][1][part.stage]:
                message = Action(send.op, send.stage, part.microbatch, send.peer)
                self.transfer(message, self.link_of(message), end_s)

    def send(self, rank: int, send: Action) -> bool:
        """The rank has come to a message that it sends; False while that holds it up."""
        raise NotImplementedError

    def receive(self, rank: int, receive: Action) -> None:
        """The rank has come to a message that it receives, and goes on."""

    def transfer(self, send: Action, link: Link, ready_s: float) -> float:
        """The message travels when it is ready and its link is free. Returns when that begins."""
        start_s = max(ready_s, self.link_free_s.get(link, 0))
        key = send.op, send.stage, send.peer
        if key not in self._ways:
            self._ways[key] = self.costs.transfer_s(send, *link), self.arrivals_of(send)
        transfer_s, arrivals = self._ways[key]
        self.link_free_s[link] = there_s = start_s + transfer_s
        arrivals[send.microbatch] = there_s
        heapq.heappush(self._wakes, (there_s, link[1]))
        return start_s
