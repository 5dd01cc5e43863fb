"""How far senders must be able to run ahead."""

from __future__ import annotations

import pytest

from disttrain.pipelining import Schedule, Wiring, lower, make_schedule
from disttrain.pipelining.schedule.catalogue import SCHEDULE_KINDS
from disttrain.pipelining.schedule.slots import slots_needed


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("name", [kind.name for kind in SCHEDULE_KINDS])
def test_every_schedule_ends_with_a_few_slots(name: str, num_ranks: int) -> None:
    assert 1 <= slots_needed(lower(make_schedule(name, num_ranks, 2 * num_ranks))) <= 4


def test_who_forwards_two_microbatches_before_the_first_backward_needs_two_slots() -> None:
    """Each rank sends the other its second message before it takes the first."""
    schedule = lower(make_schedule("InterleavedZeroBubble", 2, 4))
    assert slots_needed(schedule) == 2
    assert slots_needed(lower(make_schedule("1F1B", 2, 4))) == 1


def test_skips_and_ties_are_messages_as_well() -> None:
    wiring = Wiring(skips=((0, 2),), ties=((0, 3),))
    assert slots_needed(lower(make_schedule("1F1B", 4, 8), wiring=wiring)) >= 1


def test_what_is_taken_in_the_end_needs_room_until_then() -> None:
    schedule: Schedule = lower(make_schedule("GPipe", 2, 2), wiring=Wiring(ties=((0, 1),)))
    assert slots_needed(schedule) == 1
