"""Given the order of F and I on each rank, places each W where the rank would wait, or must free memory.

Zero Bubble's observation (arXiv:2401.10241) is that nobody waits for a W. So F and I are simulated against a clock.
Whenever a rank's next F or I is not ready yet, the rank runs the oldest W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.costs import Costs, at
from disttrain.pipelining.schedule.dependencies import as_input
from disttrain.pipelining.schedule.liveness import KeptActivations
from disttrain.pipelining.schedule.player import Player
from disttrain.pipelining.schedule.schedule import Schedule


def skeleton(schedule: Schedule) -> list[list[Action]]:
    """The F and I of each rank in order; an OVERLAP's one after the other."""
    return [
        [as_input(part) for action in actions for part in action.parts if part.op is not Op.BACKWARD_WEIGHT]
        for actions in schedule.compute_only().ranks
    ]


def fill_weights(
    template: Schedule,
    orders: Sequence[Sequence[Action]],
    costs: Costs,
    max_bytes: float,
    patience: float = 0,
    *,
    is_strict: bool = True,
) -> Filled | None:
    """W where they fit; None when the orders block each other, or would keep more than allowed.

    Args: template  for placement and counts;  orders  F and I of each rank;  max_bytes  that a rank may keep, as the
          costs count it;  patience  a W is put off when the rank's next F or I comes within this share of its time;
          is_strict  False: a rank without a W to run keeps more than max_bytes rather than wait.
    """
    player = _Filling(template, orders, costs, max_bytes, patience, is_strict=is_strict)
    player.play()
    most_bytes = max(rank.most_bytes for rank in player.states)
    if (is_strict and most_bytes > max_bytes) or any(rank.todo or rank.pending for rank in player.states):
        return None
    makespan_s = max(*player.free_s, *player.link_free_s.values(), 0)
    return Filled(template, tuple(tuple(rank.done) for rank in player.states), makespan_s, most_bytes)


@dataclass(frozen=True)
class Filled:
    """Orders with W filled in, and what they cost."""

    template: Schedule
    ranks: tuple[tuple[Action, ...], ...]
    makespan_s: float
    num_bytes: float

    @property
    def schedule(self) -> Schedule:
        return self.template.with_ranks(self.ranks)


class _Rank:
    def __init__(self, order: Sequence[Action], costs: Costs) -> None:
        self.todo = deque(order)
        self.pending: deque[Action] = deque()
        self.done: list[Action] = []
        self.kept = KeptActivations(costs.live_bytes, costs.pending_bytes)
        self.most_bytes: float = 0


class _Filling(Player):
    """Ranks choose what to do next as time goes on, so each does one action at a time."""

    def __init__(
        self,
        template: Schedule,
        orders: Sequence[Sequence[Action]],
        costs: Costs,
        max_bytes: float,
        patience: float,
        *,
        is_strict: bool,
    ) -> None:
        super().__init__(template, costs)
        self.states = [_Rank(order, costs) for order in orders]
        self._max_bytes = max_bytes
        self._patience = patience
        self._is_strict = is_strict

    def advance(self, rank: int, now_s: float) -> None:
        if now_s < self.free_s[rank]:
            return
        action = self._choose(rank, self.states[rank], now_s)
        if action is not None:
            self.compute(rank, action, now_s)
            self.wake(rank, self.free_s[rank])

    def _choose(self, rank: int, state: _Rank, now_s: float) -> Action | None:
        """Returns what to do now; None: wait for the next arrival."""
        following = state.todo[0] if state.todo else None
        ready_s = None if following is None else self.ready_s(following)
        if state.pending:
            put_off_s = self._patience * self.compute_s(state.pending[0])
            if ready_s is None or ready_s - now_s > put_off_s or not self._has_room(state, following):
                return state.pending.popleft()
        if ready_s is not None and ready_s <= now_s and (not self._is_strict or self._has_room(state, following)):
            return state.todo.popleft()
        return None

    def _has_room(self, state: _Rank, action: Action | None) -> bool:
        if action is None or action.op is not Op.FORWARD:
            return True
        return state.kept.num_bytes + at(self.costs.live_bytes, action.stage) <= self._max_bytes

    def compute(self, rank: int, action: Action, start_s: float) -> None:
        super().compute(rank, action, start_s)
        state = self.states[rank]
        state.done.append(action)
        state.kept.add(action)
        state.most_bytes = max(state.most_bytes, state.kept.num_bytes)
        if action.op is Op.BACKWARD_INPUT:
            state.pending.append(action._replace(op=Op.BACKWARD_WEIGHT))
