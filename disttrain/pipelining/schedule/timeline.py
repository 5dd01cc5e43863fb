"""The result of a simulation: when each action ran, when each message travelled, and what that says of the schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from disttrain.pipelining.schedule.action import Action
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.liveness import Peak, peaks
from disttrain.pipelining.schedule.schedule import Schedule


class Span(NamedTuple):
    """One action on one rank's compute, or collective, resource."""

    action: Action
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """One message on its link; `send` says which, `ready_s` is when the sender had it."""

    send: Action
    from_rank: int
    to_rank: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Args: compute  spans of each rank, in order;  collectives  the same for unsharding and reductions;  transfers  in
    the order of their starts, and then of ranks."""

    schedule: Schedule
    costs: Costs = field(repr=False)
    compute: tuple[tuple[Span, ...], ...] = field(repr=False)
    collectives: tuple[tuple[Span, ...], ...] = field(repr=False)
    transfers: tuple[Transfer, ...] = field(repr=False)

    @cached_property
    def peaks(self) -> tuple[Peak, ...]:
        """The most that each rank holds."""
        return peaks(self.schedule, self.costs)

    @cached_property
    def makespan_s(self) -> float:
        """From 0 until the last action and the last message have ended."""
        spans = (span.end_s for rank in (*self.compute, *self.collectives) for span in rank)
        return max((*spans, *(transfer.end_s for transfer in self.transfers)), default=0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(span.end_s - span.start_s for span in spans) for spans in self.compute)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, from 0 to the makespan, in which they don't compute."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 0.0

    @cached_property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds that each rank waits between its first action and its last.

        Zero bubble papers count this way: where no rank waits for the others between steps, the next step's first
        forwards fill what is left at both ends.
        """
        return tuple(
            spans[-1].end_s - spans[0].start_s - busy_s if spans else 0
            for spans, busy_s in zip(self.compute, self.busy_s, strict=True)
        )
