"""What a rank holds at most between forwards and backwards. Only the order of its actions decides, not their times."""

from __future__ import annotations

from dataclasses import dataclass

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.costs import Costs, at
from disttrain.pipelining.schedule.schedule import Schedule


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


def peaks(schedule: Schedule, costs: Costs | None = None) -> tuple[Peak, ...]:
    """The peak of each rank. Schedules without backward hold nothing."""
    if not schedule.has_backward:
        return (Peak(0, 0, 0, 0),) * schedule.num_ranks
    costs = costs or Costs()
    costs.require_stages(schedule.num_stages)
    return tuple(_peak(actions, costs) for actions in schedule.ranks)


def _peak(actions: tuple[Action, ...], costs: Costs) -> Peak:
    live = pending = 0
    held_bytes: float = 0
    most_live = most_pending = most_held = 0
    most_bytes: float = 0
    for action in actions:
        # An OVERLAP's forwards have started before its backwards let go of anything.
        for part in action.parts:
            if part.op is Op.FORWARD:
                live += 1
                held_bytes += at(costs.live_bytes, part.stage)
        most_live, most_held = max(most_live, live), max(most_held, live + pending)
        most_bytes = max(most_bytes, held_bytes)
        for part in action.parts:
            match part.op:
                case Op.BACKWARD:
                    live -= 1
                    held_bytes -= at(costs.live_bytes, part.stage)
                case Op.BACKWARD_INPUT:
                    live, pending = live - 1, pending + 1
                    held_bytes += at(costs.pending_bytes, part.stage) - at(costs.live_bytes, part.stage)
                case Op.BACKWARD_WEIGHT:
                    pending -= 1
                    held_bytes -= at(costs.pending_bytes, part.stage)
        most_pending, most_bytes = max(most_pending, pending), max(most_bytes, held_bytes)
    return Peak(most_live, most_pending, most_held, most_bytes)
