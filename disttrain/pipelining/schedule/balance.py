"""Cuts a row of blocks so that the most expensive stage costs as little as possible. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from disttrain.errors import ScheduleError


@dataclass(frozen=True)
class BlockCosts:
    """Costs of each block, and of what is done before the first and after the last one; in any one unit."""

    blocks: tuple[float, ...]
    before: float = 0
    after: float = 0


def balance(costs: BlockCosts, num_stages: int) -> tuple[int, ...]:
    """The first block of each stage but the first. Every stage gets a block; of equal cuts the most even one is taken.

    Raises: ScheduleError when there are fewer blocks than stages.
    """
    num_blocks = len(costs.blocks)
    if not 1 <= num_stages <= num_blocks:
        raise ScheduleError(
            "pipelining.balance",
            f"{num_blocks} blocks cannot make {num_stages} stages.",
            f"Ask for 1 to {num_blocks} stages.",
        )
    upto = [0.0, *accumulate(costs.blocks)]

    def cost(first: int, end: int) -> float:
        ends = (costs.before if first == 0 else 0) + (costs.after if end == num_blocks else 0)
        return upto[end] - upto[first] + ends

    # best[end]: for the blocks before `end` in this many stages, the highest cost, the unevenness, and the cuts.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        end: (cost(0, end), cost(0, end) ** 2, ()) for end in range(1, num_blocks + 1)
    }
    for stage in range(1, num_stages):
        # All but the whole row need only be known where another stage follows.
        ends = range(stage + 1, num_blocks + 1) if stage < num_stages - 1 else (num_blocks,)
        best = {end: _best_cut(best, end, cost) for end in ends}
    return best[num_blocks][2]


_Cut = tuple[float, float, tuple[int, ...]]


def _best_cut(best: Mapping[int, _Cut], end: int, cost: Callable[[int, int], float]) -> _Cut:
    """Returns the best way to cut the blocks before `end` into one stage more than in `best`."""
    best_yet: _Cut = (math.inf, math.inf, ())
    for first, (dearest, uneven, cuts) in best.items():
        if first >= end:
            break
        last = cost(first, end)
        costs = max(dearest, last), uneven + last**2
        # Cuts are compared where all else is equal, which is seldom.
        if costs <= best_yet[:2]:
            best_yet = min(best_yet, (*costs, (*cuts, first)))
    return best_yet


def check_boundaries(boundaries: Sequence[int], num_stages: int, num_blocks: int) -> tuple[int, ...]:
    """Boundaries that somebody has given, if they cut the blocks into so many stages.

    Raises: ScheduleError when they don't. A stage may be left without a block.
    """
    ends = [0, *boundaries, num_blocks]
    if len(boundaries) != num_stages - 1 or sorted(ends) != ends:
        raise ScheduleError(
            "pipelining.split_blocks",
            f"The boundaries {list(boundaries)} don't cut {num_blocks} blocks into {num_stages} stages.",
            f"Give {num_stages - 1} rising numbers up to {num_blocks}: the first block of each stage but the first.",
        )
    return tuple(boundaries)
