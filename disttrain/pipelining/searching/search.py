"""Finds the best schedule for measured times and a bound on memory. It tries all named schedules, each of them with its
W moved to the best places, orders that have no name, and then small changes to the best as long as they help."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from disttrain.errors import ScheduleError
from disttrain.pipelining.passes.merge_backward import merge_backward
from disttrain.pipelining.schedule.action import Action
from disttrain.pipelining.schedule.catalogue import SCHEDULE_KINDS
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.fill_weights import Filled, fill_weights, skeleton
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedule.simulator import simulate
from disttrain.pipelining.schedule.timeline import Timeline
from disttrain.pipelining.searching.families import blocks, warmups

_NUM_FINALISTS = 4
_PATIENCE = (0.25, 0.5, 1.0)

Orders = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Found:
    """A schedule with what it costs. `timeline` is of its computations, each output sent as soon as it is there."""

    timeline: Timeline
    costs: Costs

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def num_bytes(self) -> float:
        """Bytes that the fullest rank keeps."""
        return max(peak.num_bytes for peak in self.timeline.peaks)

    @property
    def score(self) -> tuple[float, float]:
        """Less is better: time, then memory."""
        return self.timeline.makespan_s, self.num_bytes


def search(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | Mapping[int, Costs],
    *,
    max_bytes: float = float("inf"),
    num_changes: int = 100,
    seed: int = 0,
) -> Found:
    """The fastest schedule found whose ranks all keep within `max_bytes`; never slower than the fastest named one.

    Args: costs  for one stage per rank, from which those for two are taken (`Costs.split`); or by stages per rank, as
          measured;  max_bytes  kept by a rank between forwards and backwards, in the costs' live_bytes and
          pending_bytes;  num_changes  small changes to try in the end;  seed  of their choice: the same arguments find
          the same schedule.
    Raises: ScheduleError when no schedule keeps within max_bytes.
    """
    by_stages = costs if isinstance(costs, Mapping) else {count: costs.split(count) for count in (1, 2)}
    named = named_schedules(num_ranks, num_microbatches, by_stages)
    results = [result for result in named if result.num_bytes <= max_bytes]
    for stages_per_rank, stage_costs in by_stages.items():
        orders: list[tuple[Schedule, Orders]] = []
        orders += ((result.schedule, skeleton(result.schedule)) for result in named if result.costs is stage_costs)
        orders += _nameless(num_ranks, num_microbatches, stages_per_rank)
        results += _Tries(stage_costs, max_bytes).best(orders, num_changes, random.Random(seed))
    if not results:
        least = min(named, key=lambda result: result.num_bytes)
        raise ScheduleError(
            "pipelining.search",
            f"No schedule of {num_ranks} ranks and {num_microbatches} microbatches keeps within {max_bytes:g} bytes.",
            f"{least.schedule.name} keeps {least.num_bytes:g}: allow as much, or make microbatches smaller.",
        )
    return min(results, key=lambda result: result.score)


def named_schedules(num_ranks: int, num_microbatches: int, by_stages: Mapping[int, Costs]) -> list[Found]:
    """Every schedule with backward that can be made for these counts.

    Raises: ScheduleError when there is none.
    """
    results = []
    refusals = []
    for stages_per_rank, costs in by_stages.items():
        for kind in SCHEDULE_KINDS:
            if stages_per_rank != kind.stages_per_rank and not kind.any_stages:
                continue
            try:
                schedule = kind.make(num_ranks, num_microbatches, stages_per_rank)
            except ScheduleError as refusal:
                refusals.append(refusal)
                continue
            if schedule.has_backward:
                results.append(Found(simulate(schedule, costs), costs))
    if not results:
        raise (
            refusals[0]
            if refusals
            else ScheduleError("pipelining.search", "There are no costs.", "Give them for 1 or 2 stages per rank.")
        )
    return results


def _nameless(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Iterator[tuple[Schedule, Orders]]:
    """Orders of F and I that are in no paper, and what they are orders of."""
    loop = Placement.loop(num_ranks, stages_per_rank)
    for order in warmups(loop, num_microbatches):
        yield _empty(loop, num_microbatches), order
    if stages_per_rank == 2:
        for order in blocks(num_ranks, num_microbatches):
            yield _empty(Placement.v(num_ranks), num_microbatches), order


def _empty(placement: Placement, num_microbatches: int) -> Schedule:
    return Schedule("Found", placement, num_microbatches, ((),) * placement.num_ranks)


class _Tries:
    """Orders of F and I with W filled in, by one set of costs."""

    def __init__(self, costs: Costs, max_bytes: float) -> None:
        self.costs = costs
        self.max_bytes = max_bytes

    def best(self, orders: Sequence[tuple[Schedule, Orders]], num_changes: int, chance: random.Random) -> list[Found]:
        tried = [filled for template, order in orders if (filled := self._fill(template, order)) is not None]
        finalists = sorted(tried, key=_score)[:_NUM_FINALISTS]
        for filled in list(finalists):
            again = (self._fill(filled.template, skeleton(filled.schedule), share) for share in _PATIENCE)
            finalists += (other for other in again if other is not None)
        if finalists:
            finalists.append(self._change(min(finalists, key=_score), num_changes, chance))
        return [result for filled in finalists for result in self._as_found(filled.schedule)]

    def _fill(self, template: Schedule, order: Orders, patience: float = 0) -> Filled | None:
        return fill_weights(template, order, self.costs, self.max_bytes, patience)

    def _as_found(self, schedule: Schedule) -> Iterator[Found]:
        """Also with a B in place of each I and the W right after it, if that is cheaper than both."""
        named = replace(schedule, name="Found")
        for variant in (named,) if self.costs.backward_s is None else (named, merge_backward(named)):
            result = Found(simulate(variant, self.costs), self.costs)
            if result.num_bytes <= self.max_bytes:
                yield result

    def _change(self, best: Filled, num_changes: int, chance: random.Random) -> Filled:
        """Exchange two neighbours in some rank's order of F and I; keep what is better."""
        orders = skeleton(best.schedule)
        for _ in range(num_changes):
            rank = chance.randrange(len(orders))
            position = chance.randrange(1, len(orders[rank]))
            order = list(orders[rank])
            order[position - 1], order[position] = order[position], order[position - 1]
            changed = [*orders[:rank], order, *orders[rank + 1 :]]
            filled = self._fill(best.template, changed)
            if filled is not None and _score(filled) < _score(best):
                best, orders = filled, changed
        return best


def _score(filled: Filled) -> tuple[float, float]:
    return filled.makespan_s, filled.num_bytes
