"""The best schedule for measured times and a bound on memory: all named ones, each again with its W where they fit best,
orders that no paper names, then small changes to the best as long as they help."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from disttrain.errors import ScheduleError
from disttrain.pipelining.action import Action
from disttrain.pipelining.catalogue import RECIPES
from disttrain.pipelining.costs import Costs
from disttrain.pipelining.passes.merge_backward import merge_backward
from disttrain.pipelining.placement import Placement
from disttrain.pipelining.schedule import Schedule
from disttrain.pipelining.searching.families import blocks, warmups
from disttrain.pipelining.searching.fill_weights import fill_weights, skeleton
from disttrain.pipelining.simulate import simulate
from disttrain.pipelining.timeline import Timeline

_PATIENCE = (0.0, 0.5, 1.0)


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
        """What the fullest rank keeps."""
        return max(peak.num_bytes for peak in self.timeline.peaks)

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better: time, then memory."""
        return self.timeline.makespan_s, self.num_bytes


def search(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | Mapping[int, Costs],
    *,
    max_bytes: float = float("inf"),
    num_changes: int = 200,
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
    best: list[Found] = [found for found in named if found.num_bytes <= max_bytes]
    least = min(named, key=lambda found: found.num_bytes, default=None)
    for stages_per_rank, stage_costs in by_stages.items():
        of_these = [found.schedule for found in named if found.costs is stage_costs]
        for filled in _filled(num_ranks, num_microbatches, stages_per_rank, stage_costs, max_bytes, of_these):
            best.append(filled)
    if not best:
        raise ScheduleError(
            "pipelining.search",
            f"No schedule of {num_ranks} ranks and {num_microbatches} microbatches keeps within {max_bytes:g} bytes.",
            f"{least.schedule.name} keeps {least.num_bytes:g}: allow as much, or make microbatches smaller."
            if least
            else "Give costs for 1 or 2 stages per rank.",
        )
    return _changed(min(best, key=lambda found: found.rank), max_bytes, num_changes, random.Random(seed))


def named_schedules(num_ranks: int, num_microbatches: int, by_stages: Mapping[int, Costs]) -> list[Found]:
    """Every schedule with backward that can be made for these counts."""
    found = []
    for stages_per_rank, costs in by_stages.items():
        for recipe in RECIPES:
            if stages_per_rank != recipe.stages_per_rank and not recipe.any_stages:
                continue
            try:
                schedule = recipe.make(num_ranks, num_microbatches, stages_per_rank)
            except ScheduleError:
                continue  # not for these counts
            if schedule.has_backward:
                found.append(Found(simulate(schedule, costs), costs))
    return found


def _filled(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    costs: Costs,
    max_bytes: float,
    named: Sequence[Schedule],
) -> Iterator[Found]:
    """W placed by the clock, in the order of F and I of each named schedule and of what is in no paper."""
    loop = _empty(Placement.loop(num_ranks, stages_per_rank), num_microbatches)
    orders = [(schedule, skeleton(schedule)) for schedule in named]
    orders += [(loop, order) for order in warmups(loop.placement, num_microbatches)]
    if stages_per_rank == 2:
        v = _empty(Placement.v(num_ranks), num_microbatches)
        orders += [(v, order) for order in blocks(num_ranks, num_microbatches)]
    seen = set()
    for template, order in orders:
        key = template.placement, tuple(map(tuple, order))
        if key not in seen:
            seen.add(key)
            yield from _try(template, order, costs, max_bytes, _PATIENCE)


def _empty(placement: Placement, num_microbatches: int) -> Schedule:
    return Schedule("", placement, num_microbatches, ((),) * placement.num_ranks)


def _try(
    template: Schedule, orders: Sequence[Sequence[Action]], costs: Costs, max_bytes: float, patience: Sequence[float]
) -> Iterator[Found]:
    for share in patience:
        filled = fill_weights(template, orders, costs, max_bytes, share)
        for schedule in () if filled is None else (filled, merge_backward(filled)):
            found = Found(simulate(replace(schedule, name="Found"), costs), costs)
            if found.num_bytes <= max_bytes:
                yield found


def _changed(best: Found, max_bytes: float, num_changes: int, chance: random.Random) -> Found:
    """Exchange two neighbours in some rank's order of F and I; keep what is better."""
    orders = skeleton(best.schedule)
    for _ in range(num_changes):
        rank = chance.randrange(len(orders))
        if len(orders[rank]) < 2:
            continue
        position = chance.randrange(len(orders[rank]) - 1)
        order = list(orders[rank])
        order[position], order[position + 1] = order[position + 1], order[position]
        changed = [*orders[:rank], order, *orders[rank + 1 :]]
        for found in _try(best.schedule, changed, best.costs, max_bytes, _PATIENCE[:1]):
            if found.rank < best.rank:
                best, orders = found, changed
    return best
