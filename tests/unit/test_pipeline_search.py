"""The search finds what is at least as good as every named schedule, within its bounds."""

from __future__ import annotations

import pytest

from disttrain.errors import ScheduleError
from disttrain.pipelining import Costs, Link, lower, search, simulate, verify
from disttrain.pipelining.searching.search import named_schedules

MEASURED = {
    "units of the papers": Costs(),
    "slow links": Costs(10, 12, 6, link=Link(2)),
    "heavy weights": Costs(10, 9, 14),
    "one backward is cheaper": Costs(10, 12, 6, 15),
    "stages differ": Costs(forward_s=(4, 2, 3), backward_input_s=(4, 2, 5), backward_weight_s=2, link=Link(1)),
}


@pytest.mark.parametrize("kept", [2, 3, float("inf")])
@pytest.mark.parametrize("name", MEASURED)
def test_nothing_that_has_a_name_is_better(name: str, kept: float) -> None:
    costs = MEASURED[name]
    by_stages = {1: costs} if isinstance(costs.forward_s, tuple) else {1: costs, 2: costs.split(2)}
    named = [one for one in named_schedules(3, 6, by_stages) if one.num_bytes <= kept]
    found = search(3, 6, by_stages, max_bytes=kept, num_changes=10)
    verify(found.schedule)
    verify(lower(found.schedule))
    assert found.num_bytes <= kept
    assert simulate(found.schedule, found.costs).makespan_s == found.timeline.makespan_s
    assert found.timeline.makespan_s <= min((one.timeline.makespan_s for one in named), default=float("inf"))


def test_what_it_finds_can_be_better_than_all_that_have_names() -> None:
    """By more than 5 % here; the same arguments find the same."""
    costs = MEASURED["slow links"]
    found = search(4, 8, costs, max_bytes=3)
    named = [one for one in named_schedules(4, 8, {1: costs, 2: costs.split(2)}) if one.num_bytes <= 3]
    assert found.schedule.name == "Found"
    assert found.timeline.makespan_s < 0.95 * min(one.timeline.makespan_s for one in named)
    assert search(4, 8, costs, max_bytes=3).schedule == found.schedule


def test_too_little_memory_names_the_leanest() -> None:
    with pytest.raises(
        ScheduleError, match=r"within 0\.5 bytes\. V-\w+ keeps [\d.]+: allow as much, or make microbatches"
    ):
        search(4, 8, Costs(), max_bytes=0.5)


def test_counts_that_no_schedule_takes() -> None:
    with pytest.raises(ScheduleError, match="num_ranks is 0"):
        search(0, 8, Costs())
    with pytest.raises(ScheduleError, match="There are no costs"):
        search(2, 8, {})
