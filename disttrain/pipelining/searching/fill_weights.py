"""Given in which order each rank runs its F and I, finds places for W: where the rank would wait, or must make room.

Zero Bubble's observation (arXiv:2401.10241) is that nobody waits for a W. So this plays F and I as a clock has them
and, whenever a rank's next one is not there yet, runs the oldest W that waits.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.costs import Costs, at
from disttrain.pipelining.schedule.schedule import Schedule


def skeleton(schedule: Schedule) -> list[list[Action]]:
    """Of each rank, its F and I in order; an OVERLAP's one after the other."""
    return [
        [
            part._replace(op=Op.BACKWARD_INPUT) if part.op is Op.BACKWARD else part
            for action in actions
            for part in action.parts
            if part.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)
        ]
        for actions in schedule.ranks
    ]


def fill_weights(
    template: Schedule, orders: Sequence[Sequence[Action]], costs: Costs, max_bytes: float, patience: float
) -> Filled | None:
    """W where they fit; None when the orders block each other, or would keep more than allowed.

    Args: template  for placement and counts;  orders  F and I of each rank;  max_bytes  that a rank may keep, as the
          costs count it;  patience  a W is put off when the rank's next F or I comes within this share of its time.
    """
    player = _Player(template, orders, costs, max_bytes, patience)
    player.play()
    most_bytes = max(rank.most_bytes for rank in player.ranks)
    if most_bytes > max_bytes or any(rank.todo or rank.pending for rank in player.ranks):
        return None
    makespan_s = max(player.last_arrival_s, *(rank.free_s for rank in player.ranks))
    return Filled(template, tuple(tuple(rank.done) for rank in player.ranks), makespan_s, most_bytes)


@dataclass(frozen=True)
class Filled:
    """What came of it, and what that costs."""

    template: Schedule
    ranks: tuple[tuple[Action, ...], ...]
    makespan_s: float
    num_bytes: float

    @property
    def schedule(self) -> Schedule:
        return self.template.with_ranks(self.ranks)


@dataclass
class _Rank:
    todo: deque[Action]
    pending: deque[Action] = field(default_factory=deque)
    done: list[Action] = field(default_factory=list)
    free_s: float = 0
    held_bytes: float = 0
    most_bytes: float = 0


class _Player:
    def __init__(
        self, template: Schedule, orders: Sequence[Sequence[Action]], costs: Costs, max_bytes: float, patience: float
    ) -> None:
        self.schedule = template
        self.home = template.placement.ranks
        self.costs = costs
        self.max_bytes = max_bytes
        self.patience = patience
        self.ranks = [_Rank(deque(order)) for order in orders]
        self.arrived_s: dict[tuple[Action, int], float] = {}  # of what was computed, at which rank
        self.link_free_s: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.last_arrival_s: float = 0
        self.wakes: list[tuple[float, int]] = [(0, rank) for rank in range(len(self.ranks))]

    def play(self) -> None:
        while self.wakes:
            now_s, rank = heapq.heappop(self.wakes)
            state = self.ranks[rank]
            if now_s >= state.free_s and (action := self._choose(rank, state, now_s)) is not None:
                self._run(rank, state, action, now_s)

    def _choose(self, rank: int, state: _Rank, now_s: float) -> Action | None:
        """What to do now; None: wait for the next arrival."""
        ready_s = self._ready_s(rank, state.todo[0]) if state.todo else math.inf
        if state.pending:
            weight = state.pending[0]
            put_off_s = self.patience * self.costs.of(weight)
            if ready_s - now_s > put_off_s or not self._has_room(state, state.todo[0]):
                return state.pending.popleft()
        if ready_s <= now_s and self._has_room(state, state.todo[0]):
            return state.todo.popleft()
        if now_s < ready_s < math.inf:
            heapq.heappush(self.wakes, (ready_s, rank))
        return None

    def _has_room(self, state: _Rank, action: Action) -> bool:
        more = at(self.costs.live_bytes, action.stage)
        return action.op is not Op.FORWARD or state.held_bytes + more <= self.max_bytes

    def _ready_s(self, rank: int, action: Action) -> float:
        stage, microbatch = action.stage, action.microbatch
        if action.op is Op.FORWARD:
            needed = [Action(Op.FORWARD, source, microbatch) for source in self.schedule.sources[stage]]
        else:
            needed = [Action(Op.BACKWARD_INPUT, target, microbatch) for target in self.schedule.targets[stage]]
            needed.append(Action(Op.FORWARD, stage, microbatch))
        return max((self.arrived_s.get((part, rank), math.inf) for part in needed), default=0)

    def _run(self, rank: int, state: _Rank, action: Action, now_s: float) -> None:
        state.done.append(action)
        state.free_s = end_s = now_s + self.costs.of(action)
        heapq.heappush(self.wakes, (end_s, rank))
        live, pending = at(self.costs.live_bytes, action.stage), at(self.costs.pending_bytes, action.stage)
        if action.op is Op.BACKWARD_WEIGHT:
            state.held_bytes -= pending
            return
        self.arrived_s[action, rank] = end_s
        if action.op is Op.FORWARD:
            state.held_bytes += live
            others, send = self.schedule.targets[action.stage], Op.SEND_F
        else:
            state.held_bytes += pending - live
            state.pending.append(action._replace(op=Op.BACKWARD_WEIGHT))
            others, send = self.schedule.sources[action.stage], Op.SEND_B
        state.most_bytes = max(state.most_bytes, state.held_bytes)
        for other in self.schedule.elsewhere(action.stage, others):
            way = rank, self.home[other]
            message = Action(send, action.stage, action.microbatch, other)
            arrival_s = max(end_s, self.link_free_s[way]) + self.costs.transfer_s(message, *way)
            self.link_free_s[way] = self.arrived_s[action, way[1]] = arrival_s
            self.last_arrival_s = max(self.last_arrival_s, arrival_s)
            heapq.heappush(self.wakes, (arrival_s, way[1]))
