"""The work for a schedule grows with its actions, and with nothing faster: it is counted for two sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from disttrain.pipelining import lower, make_schedule, verify
from disttrain.pipelining.checks import actions, order
from disttrain.pipelining.schedule import slots, verifier
from disttrain.pipelining.schedule.catalogue import SCHEDULE_KINDS
from disttrain.pipelining.schedule.player import Player

SIZES = ((4, 16), (8, 32))
NAMES = [kind.name for kind in SCHEDULE_KINDS]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def counting(*arguments: Any, **named: Any) -> Any:
            counted[name] += 1
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, counting)

    for owner, name in (
        (Player, "step"),
        (Player, "advance"),
        (actions._Allowed, "_wrong"),
        (order, "inputs_of"),
        (verifier, "peaks"),
        (slots, "_ends"),
    ):
        count(owner, name)
    return counted


@pytest.mark.parametrize("name", NAMES)
def test_each_action_is_played_a_bounded_number_of_times(name: str, counts: Counter[str]) -> None:
    for num_ranks, num_microbatches in SIZES:
        schedule = make_schedule(name, num_ranks, num_microbatches)
        counts.clear()
        lowered = lower(schedule)
        # Each computation once, and once more where a rank waits for it.
        assert counts["step"] <= 2 * sum(map(len, schedule.ranks)) + 2 * num_ranks
        counts.clear()
        verify(lowered)
        num_actions = sum(map(len, lowered.ranks))
        assert counts["step"] <= 2 * num_actions
        assert counts["advance"] <= num_actions + num_ranks
        assert not counts["peaks"], "nobody has asked for what is kept"


@pytest.mark.parametrize("name", NAMES)
def test_rules_are_looked_up_for_kinds_and_not_for_microbatches(name: str, counts: Counter[str]) -> None:
    looked_up = []
    for num_microbatches in (16, 64):
        schedule = lower(make_schedule(name, 4, num_microbatches))
        counts.clear()
        verify(schedule)
        looked_up.append((counts["_wrong"], counts["inputs_of"]))
    assert looked_up[0] == looked_up[1]


def test_slots_are_found_in_a_logarithm_of_plays(counts: Counter[str]) -> None:
    for num_microbatches in (16, 64):
        schedule = lower(make_schedule("LoopedBFS", 4, num_microbatches))
        counts.clear()
        num_slots = slots.slots_needed(schedule)
        assert counts["_ends"] <= 2 * math.log2(num_slots) + 2
        assert num_slots == 1 or not slots._ends(schedule, num_slots - 1)
        assert slots._ends(schedule, num_slots)
