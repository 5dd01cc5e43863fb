"""Costs of actions: seconds of computing, bytes on links, bytes kept between forward and backward.

The defaults are the units of the papers: F = I = W = 1, B = 2, messages in no time, one unit kept per forward until its
W. Any number will do for a time, so integers and fractions stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.action import MESSAGES, TIED, Action, Op

PerStage = float | tuple[float, ...]


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: a message occupies it for latency_s + bytes / bytes_per_s."""

    latency_s: float = 0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.bytes_per_s > 0):
            raise ScheduleError("Link", f"{self} cannot be.", "Give a latency from 0 on, and a bandwidth above 0.")

    def transfer_s(self, num_bytes: float) -> float:
        return self.latency_s if math.isinf(self.bytes_per_s) else self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Costs:
    """Measured or assumed; one number for all stages, or a tuple with one per stage.

    Args: backward_s  of a B; None: as long as I and W together;  overlap_saves  the share of an OVERLAP's shorter
          children that its longest one hides, from 0 (one after the other) to 1;  message_bytes  of the activations a
          stage sends, and of the gradients that come back;  tied_bytes  of a tied weight's gradient;  link  between any
          two ranks, unless `links` has another for (from rank, to rank);  live_bytes  kept from a forward until the
          backward of its inputs;  pending_bytes  kept from then until its W.
    """

    forward_s: PerStage = 1
    backward_input_s: PerStage = 1
    backward_weight_s: PerStage = 1
    backward_s: PerStage | None = None
    overlap_saves: float = 0
    message_bytes: PerStage = 0
    tied_bytes: float = 0
    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    unshard_s: PerStage = 0
    reduce_grad_s: PerStage = 0
    live_bytes: PerStage = 1
    pending_bytes: PerStage = 1

    def __post_init__(self) -> None:
        for name in (*_SHARED, "message_bytes", "tied_bytes", "overlap_saves"):
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values or 0,):
                if not 0 <= value < math.inf:
                    raise ScheduleError("Costs", f"{name} is {value:g}.", "Give a finite number that is not negative.")
        if self.overlap_saves > 1:
            raise ScheduleError("Costs", f"overlap_saves is {self.overlap_saves:g}.", "Give a share from 0 to 1.")

    def require_stages(self, num_stages: int) -> None:
        """Raises: ScheduleError when there is a cost per stage, and for another number of stages."""
        for name in (*_SHARED, "message_bytes"):
            values = getattr(self, name)
            if isinstance(values, tuple) and len(values) != num_stages:
                raise ScheduleError(
                    "Costs",
                    f"{name} has {len(values)} values, the schedule {num_stages} stages.",
                    "Give one for each stage, or one number for all.",
                )

    def split(self, stages_per_rank: int) -> Costs:
        """The same model with a multiple of the stages: each stage takes and keeps less by that factor. Messages stay
        as large, and there are more of them.

        Raises: ScheduleError when a cost is given per stage: nobody knows how those are cut.
        """
        if stages_per_rank == 1:
            return self
        shares = {name: getattr(self, name) for name in _SHARED}
        if any(isinstance(share, tuple) for share in shares.values()):
            raise ScheduleError(
                "Costs.split", "Costs are given per stage.", f"Measure the model in {stages_per_rank} stages per rank."
            )
        return replace(self, **{name: share and share / stages_per_rank for name, share in shares.items()})

    def of(self, action: Action) -> float:
        """Seconds that the action keeps its rank computing, or its rank's collectives communicating."""
        if action.children:
            times = [self.of(child) for child in action.children]
            return sum(times) - self.overlap_saves * (sum(times) - max(times))
        stage = action.stage
        match action.op:
            case Op.FORWARD:
                return at(self.forward_s, stage)
            case Op.BACKWARD_INPUT:
                return at(self.backward_input_s, stage)
            case Op.BACKWARD_WEIGHT:
                return at(self.backward_weight_s, stage)
            case Op.BACKWARD if self.backward_s is None:
                return at(self.backward_input_s, stage) + at(self.backward_weight_s, stage)
            case Op.BACKWARD:
                assert self.backward_s is not None
                return at(self.backward_s, stage)
            case Op.UNSHARD:
                return at(self.unshard_s, stage)
            case Op.REDUCE_GRAD:
                return at(self.reduce_grad_s, stage)
        return 0

    def transfer_s(self, message: Action, from_rank: int, to_rank: int) -> float:
        """Seconds that a send occupies its link."""
        assert message.op in MESSAGES
        assert message.peer is not None
        link = self.links.get((from_rank, to_rank), self.link)
        if message.op in TIED:
            return link.transfer_s(self.tied_bytes)
        return link.transfer_s(at(self.message_bytes, min(message.stage, message.peer)))


_SHARED = (
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "backward_s",
    "unshard_s",
    "reduce_grad_s",
    "live_bytes",
    "pending_bytes",
)


def at(values: PerStage, stage: int) -> float:
    """The value of one stage."""
    return values[stage] if isinstance(values, tuple) else values
