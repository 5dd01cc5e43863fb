"""Counts what a rank keeps between forwards and backwards. Only the order of its actions decides, not their times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.costs import Costs, PerStage, at
from disttrain.pipelining.schedule.schedule import Schedule

# The changes of the number of forwards without their backward, and of I without their W.
_CHANGES = {Op.FORWARD: (1, 0), Op.BACKWARD: (-1, 0), Op.BACKWARD_INPUT: (-1, 1), Op.BACKWARD_WEIGHT: (0, -1)}


@dataclass(frozen=True)
class Peak:
    """The most that one rank ever holds, each figure at its own worst moment.

    Args: live  forwards whose I or B has not ended;  pending  I whose W has not ended;  held  both together;
          num_bytes  by the costs' live_bytes and pending_bytes.
    """

    live: int
    pending: int
    held: int
    num_bytes: float


class KeptActivations:
    """Bytes, or a number, that one rank keeps for backwards to come: `live` of forwards, `pending` of I. It grows and
    shrinks by parts of actions, each by what is kept for its stage."""

    def __init__(self, live_each: PerStage = 1, pending_each: PerStage = 1) -> None:
        self.live: float = 0
        self.pending: float = 0
        self._each = live_each, pending_each

    @property
    def num_bytes(self) -> float:
        """Both together."""
        return self.live + self.pending

    def add(self, part: Action) -> None:
        """The part has begun, if it is a forward, or else ended."""
        live, pending = _CHANGES.get(part.op, (0, 0))
        if live:
            self.live += live * at(self._each[0], part.stage)
        if pending:
            self.pending += pending * at(self._each[1], part.stage)

    def moments(self, actions: Iterable[Action]) -> Iterator[tuple[Action | None, float, float]]:
        """Each action with what is live and pending while it runs, then None with what is after it."""
        for action in actions:
            # The forwards of an OVERLAP start before its backwards free anything.
            for part in action.parts:
                if part.op is Op.FORWARD:
                    self.add(part)
            yield action, self.live, self.pending
            for part in action.parts:
                if part.op is not Op.FORWARD:
                    self.add(part)
            yield None, self.live, self.pending


def peaks(schedule: Schedule, costs: Costs | None = None) -> tuple[Peak, ...]:
    """The peak of each rank. Schedules without backward hold nothing."""
    if not schedule.has_backward:
        return (Peak(0, 0, 0, 0),) * schedule.num_ranks
    costs = costs or Costs()
    costs.require_stages(schedule.num_stages)
    return tuple(_peak(actions, costs) for actions in schedule.ranks)


def _peak(actions: tuple[Action, ...], costs: Costs) -> Peak:
    counts = [(0, 0), *((int(live), int(pending)) for _, live, pending in KeptActivations().moments(actions))]
    in_bytes = KeptActivations(costs.live_bytes, costs.pending_bytes).moments(actions)
    return Peak(
        live=max(live for live, _ in counts),
        pending=max(pending for _, pending in counts),
        held=max(live + pending for live, pending in counts),
        num_bytes=max((live + pending for _, live, pending in in_bytes), default=0),
    )
