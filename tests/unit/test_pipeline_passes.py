"""What each pass adds, and that all together leave the order of computations as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.errors import ScheduleError
from disttrain.pipelining import (
    Costs,
    Link,
    Op,
    Schedule,
    Wiring,
    from_csv,
    lower,
    make_schedule,
    simulate,
    to_csv,
    verify,
)
from disttrain.pipelining.passes import (
    insert_messages,
    merge_backward,
    merge_where_free,
    place_receives_early,
    reduce_gradients,
    split_backward,
    unshard_stages,
)
from disttrain.pipelining.schedule.action import MESSAGES, RECEIVES
from disttrain.pipelining.schedule.catalogue import SCHEDULE_KINDS


def _rows(schedule: Schedule) -> list[str]:
    return to_csv(schedule).splitlines()


def test_messages_stand_where_they_are_ready() -> None:
    assert _rows(insert_messages(make_schedule("1F1B", 2, 2))) == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
    ]


def test_messages_are_inserted_once() -> None:
    with pytest.raises(ScheduleError, match=r"has messages already\. Begin with its computations only"):
        insert_messages(insert_messages(make_schedule("1F1B", 2, 2)))
    lowered = lower(make_schedule("1F1B", 2, 2))
    assert lowered.compute_only() == make_schedule("1F1B", 2, 2)


def test_skip_edges_and_ties() -> None:
    wiring = Wiring(skips=((0, 2),), ties=((0, 2),))
    schedule = replace(make_schedule("GPipe", 3, 1), wiring=wiring)
    assert _rows(insert_messages(schedule)) == [
        "0F0,0SEND_F0,0SEND_F0>2,0RECV_B0<2,0RECV_B0,0B0,0SEND_TIED>2,0RECV_TIED<2",
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0",
        "2RECV_F0<0,2RECV_F0,2F0,2B0,2SEND_B0,2SEND_B0>0,2RECV_TIED<0,2SEND_TIED>0",
    ]


def test_receives_move_up_past_computations_only() -> None:
    schedule = from_csv("0F0,0SEND_F0,0F1,0F2,0SEND_F1,0SEND_F2\n1RECV_F0,1F0,1RECV_F1,1F1,1RECV_F2,1F2\n")
    assert _rows(place_receives_early(schedule, 1))[1] == "1RECV_F0,1RECV_F1,1F0,1RECV_F2,1F1,1F2"
    assert _rows(place_receives_early(schedule, 9))[1] == "1RECV_F0,1RECV_F1,1RECV_F2,1F0,1F1,1F2"
    assert place_receives_early(schedule, 0) == schedule


def test_receives_pass_no_message_of_the_same_pair() -> None:
    schedule = from_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert place_receives_early(schedule, 9) == schedule


def test_receives_pass_sends_where_each_direction_goes_by_itself() -> None:
    schedule = insert_messages(make_schedule("1F1B", 2, 2))
    assert _rows(place_receives_early(schedule, 9, by_direction=True)) == [
        "0RECV_B0,0RECV_B1,0F0,0SEND_F0,0F1,0SEND_F1,0B0,0B1",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
    ]
    assert _rows(place_receives_early(schedule, 1, by_direction=True))[0] == (
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1"
    )


def test_early_receives_hide_the_links_time() -> None:
    """A receive that is posted one computation ahead lets its message travel meanwhile."""
    schedule = insert_messages(make_schedule("ForwardOnly", 4, 8))
    costs = Costs(link=Link(1))
    late = simulate(schedule, costs).makespan_s
    assert simulate(place_receives_early(schedule), costs).makespan_s <= late


def test_merging_and_splitting() -> None:
    schedule = from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1\n")
    assert _rows(merge_backward(schedule)) == ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"]
    assert _rows(merge_where_free(schedule)) == ["0F0,0F1,0B0,0B1", "1F0,1F1,1I0,1W0,1I1,1W1"]
    assert split_backward(merge_backward(schedule)) == schedule
    apart = from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n")
    assert merge_backward(apart) == apart


def test_reductions_follow_the_last_gradient() -> None:
    (row,) = _rows(reduce_gradients(make_schedule("LoopedBFS", 1, 2, 2)))
    assert row == "0F0,0F1,1F0,1F1,1B1,1B0,1REDUCE_GRAD,0B1,0B0,0REDUCE_GRAD"
    assert reduce_gradients(make_schedule("ForwardOnly", 2, 2)) == make_schedule("ForwardOnly", 2, 2)


@pytest.mark.parametrize(
    ("max_unsharded", "row"),
    [
        (None, "0UNSHARD,1UNSHARD,2UNSHARD,0F0,1F0,2F0,2B0,2RESHARD,1B0,1RESHARD,0B0,0RESHARD"),
        (2, "0UNSHARD,1UNSHARD,0F0,0RESHARD,2UNSHARD,1F0,2F0,2B0,2RESHARD,0UNSHARD,1B0,1RESHARD,0B0,0RESHARD"),
        (1, "0+,0F0,0-,1+,1F0,1-,2+,2F0,2B0,2-,1+,1B0,1-,0+,0B0,0-".replace("+", "UNSHARD").replace("-", "RESHARD")),
    ],
)
def test_stages_are_unsharded_when_there_is_room(max_unsharded: int | None, row: str) -> None:
    schedule = unshard_stages(make_schedule("LoopedBFS", 1, 1, 3), max_unsharded)
    assert _rows(schedule) == [row]
    verify(schedule)


def test_an_overlap_needs_room_for_both() -> None:
    with pytest.raises(ScheduleError, match=r"needs 2 unsharded stages, max_unsharded is 1\. Allow 2 or more\."):
        unshard_stages(make_schedule("DualPipeV", 2, 4), 1)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(SCHEDULE_KINDS),
    num_ranks=st.integers(1, 4),
    rounds=st.integers(2, 4),
    max_unsharded=st.sampled_from([None, 2, 3]),
    num_ahead=st.integers(0, 3),
    latency_s=st.sampled_from([0, 0.3, 2]),
)
def test_lowering_leaves_the_computations(
    kind: object, num_ranks: int, rounds: int, max_unsharded: int | None, num_ahead: int, latency_s: float
) -> None:
    """Whatever the model's wiring and the options are: right, and all else is added."""
    name = getattr(kind, "name", "")
    schedule = make_schedule(name, num_ranks, num_ranks * rounds)
    last = schedule.num_stages - 1
    skips = tuple((stage, last) for stage in range(last - 1))
    wiring = Wiring(skips, ((0, last),) if last else ())
    costs = Costs(link=Link(latency_s))
    lowered = lower(schedule, wiring=wiring, costs=costs, max_unsharded=max_unsharded, num_ahead=num_ahead)
    verify(lowered)
    assert lowered.compute_only().ranks == merge_where_free(schedule).ranks
    assert simulate(lowered, costs).makespan_s > 0
    kinds = {action.op for actions in lowered.ranks for action in actions}
    assert (not kinds & MESSAGES) == (num_ranks == 1)
    assert (Op.REDUCE_GRAD in kinds) == schedule.has_backward


@pytest.mark.parametrize("name", [kind.name for kind in SCHEDULE_KINDS if kind.name != "DualPipeV"])
def test_messages_that_take_no_time_cost_none(name: str) -> None:
    """With all in place the schedule is as fast as its computations alone."""
    schedule = make_schedule(name, 4, 12)
    assert simulate(lower(schedule)).makespan_s == simulate(schedule).makespan_s
    assert any(action.op in RECEIVES for action in lower(schedule).ranks[3])
