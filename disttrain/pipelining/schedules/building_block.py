"""Schedules on a V by repeating a building block: one microbatch's actions at offsets that collide with no other's when
a block begins every 6 units of time. How long a block holds its activations decides the memory (Qi et al., Pipeline
Parallelism with Controllable Memory, arXiv:2405.15362)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.alternating import weight_of

PERIOD = 6  # F, I and W of two stages

# When a rank runs its block's F there, F back, I back and I there.
Offsets = tuple[int, int, int, int]


def repeat_block(name: str, num_microbatches: int, blocks: Sequence[Offsets], most_held: int) -> Schedule:
    """Each rank keeps the order that its blocks overlay to, begins as soon as it can, and runs a W when it would wait,
    or hold more than `most_held` forwards."""
    placement = Placement.v(len(blocks))
    ranks = [
        _Rank(overlay(stages, block, num_microbatches), most_held)
        for stages, block in zip(placement.stages, blocks, strict=True)
    ]
    ended: dict[Action, int] = {}
    now = 0
    while any(rank.has_more for rank in ranks):
        for rank in ranks:
            rank.run_one(now, ended, placement.num_stages - 1)
        now += 1
    return Schedule(name, placement, num_microbatches, tuple(tuple(rank.done) for rank in ranks))


def overlay(stages: tuple[int, ...], block: Offsets, num_microbatches: int) -> deque[Action]:
    """A rank's F and I when a block begins every `PERIOD`."""
    there, back = stages
    kinds = (Op.FORWARD, there), (Op.FORWARD, back), (Op.BACKWARD_INPUT, back), (Op.BACKWARD_INPUT, there)
    planned = sorted(
        (offset + PERIOD * microbatch, Action(op, stage, microbatch))
        for offset, (op, stage) in zip(block, kinds, strict=True)
        for microbatch in range(num_microbatches)
    )
    return deque(action for _, action in planned)


class _Rank:
    def __init__(self, planned: deque[Action], most_held: int) -> None:
        self.planned = planned
        self.most_held = most_held
        self.num_held = 0
        self.pending: deque[Action] = deque()
        self.done: list[Action] = []

    @property
    def has_more(self) -> bool:
        return bool(self.planned or self.pending)

    def run_one(self, now: int, ended: dict[Action, int], last_stage: int) -> None:
        """What this rank does from `now` to `now + 1`."""
        if self.planned and self._may_run(self.planned[0], now, ended, last_stage):
            action = self.planned.popleft()
            ended[action] = now + 1
            if action.op is Op.FORWARD:
                self.num_held += 1
            else:
                self.pending.append(weight_of(action))
        elif self.pending:
            action = self.pending.popleft()
            self.num_held -= 1
        else:
            return
        self.done.append(action)

    def _may_run(self, action: Action, now: int, ended: dict[Action, int], last_stage: int) -> bool:
        if action.op is Op.FORWARD and self.num_held >= self.most_held and self.pending:
            return False
        before = _before(action, last_stage)
        return before is None or ended.get(before, now + 1) <= now


def _before(action: Action, last_stage: int) -> Action | None:
    """What an F or I needs to have ended; its own rank's order sees to the rest."""
    op, stage, microbatch = action[:3]
    if op is Op.FORWARD:
        return Action(op, stage - 1, microbatch) if stage else None
    return Action(op, stage + 1, microbatch) if stage < last_stage else Action(Op.FORWARD, stage, microbatch)
