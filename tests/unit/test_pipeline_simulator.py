"""The simulator against sums done by hand: links, overlap, unsharding, what is kept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from disttrain.errors import ScheduleError
from disttrain.pipelining import Costs, Link, Timeline, Wiring, from_csv, lower, make_schedule, peaks, simulate, verify

CHAIN = "0F0,0F1\n1F0,1F1\n"


def _times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    spans = [span for rank in (*timeline.compute, *timeline.collectives) for span in rank]
    moved = {str(transfer.send): (transfer.start_s, transfer.end_s) for transfer in timeline.transfers}
    return {str(span.action): (span.start_s, span.end_s) for span in spans} | moved


def test_messages_take_their_time_and_turns() -> None:
    """3 s for each on the link; the second waits for the first, the ranks compute meanwhile."""
    costs = Costs(forward_s=2, message_bytes=200, link=Link(latency_s=1, bytes_per_s=100))
    timeline = simulate(from_csv(CHAIN), costs)
    assert _times(timeline) == {
        "0F0": (0, 2),
        "0F1": (2, 4),
        "0SEND_F0": (2, 5),
        "0SEND_F1": (5, 8),
        "1F0": (5, 7),
        "1F1": (8, 10),
    }
    assert (timeline.makespan_s, timeline.busy_s, timeline.idle_s) == (10, (4, 4), (0, 1))
    assert timeline.bubble == pytest.approx(12 / 20)
    assert [transfer.ready_s for transfer in timeline.transfers] == [2, 4]


def test_links_differ_by_direction() -> None:
    """The slow link is from rank 1 to 0 only: gradients wait, activations don't."""
    costs = Costs(links={(1, 0): Link(10)})
    timeline = simulate(make_schedule("1F1B", 2, 1), costs)
    assert _times(timeline)["1F0"] == (1, 2)
    assert _times(timeline)["0B0"] == (14, 16)


def test_receives_that_are_posted_late_hold_up_the_message() -> None:
    late = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"
    early = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n"
    costs = Costs(forward_s=(1, 4), link=Link(2))
    assert simulate(from_csv(late), costs).makespan_s == 13  # 1 + 2 + 4, then 2 + 4
    assert simulate(from_csv(early), costs).makespan_s == 11  # 1 + 2 + 4 + 4
    assert simulate(from_csv(CHAIN), costs).makespan_s == 11


def test_backward_and_overlap_have_times_of_their_own() -> None:
    together = from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0I1,0W1,0B2")
    assert simulate(together, Costs(3, 2, 1)).makespan_s == 3 + 3 + 6 + 2 + 1 + 3
    assert simulate(together, Costs(3, 2, 1, backward_s=2)).makespan_s == 3 + 3 + 5 + 2 + 1 + 2
    assert simulate(together, Costs(3, 2, 1, overlap_saves=1)).makespan_s == 3 + 3 + 3 + 2 + 1 + 3
    assert simulate(together, Costs(3, 2, 1, overlap_saves=0.5)).makespan_s == 3 + 3 + 4.5 + 2 + 1 + 3


def test_unsharding_and_reductions_run_beside_the_computations() -> None:
    schedule = lower(make_schedule("GPipe", 1, 2))
    assert [str(action) for action in schedule.ranks[0]] == [
        "0UNSHARD", "0F0", "0F1", "0B0", "0B1", "0REDUCE_GRAD", "0RESHARD",
    ]  # fmt: skip
    timeline = simulate(schedule, Costs(unshard_s=5, reduce_grad_s=4))
    assert _times(timeline)["0F0"] == (5, 6)
    assert _times(timeline)["0REDUCE_GRAD"] == (11, 15)
    assert timeline.makespan_s == 15


def test_prefetched_stages_cost_nothing() -> None:
    schedule = lower(make_schedule("LoopedBFS", 1, 4, 2))
    timeline = simulate(schedule, Costs(unshard_s=1))
    assert timeline.makespan_s == 1 + 8 + 16


def test_skips_and_ties_travel_as_well() -> None:
    wiring = Wiring(skips=((0, 2),), ties=((0, 2),))
    costs = Costs(message_bytes=(4, 1, 0), tied_bytes=5, link=Link(bytes_per_s=1))
    timeline = simulate(lower(make_schedule("GPipe", 3, 1), wiring=wiring), costs)
    moved = _times(timeline)
    assert moved["0SEND_F0"] == (1, 5)
    assert moved["0SEND_F0>2"] == (1, 5)
    assert moved["1SEND_F0"] == (6, 7)
    assert moved["2F0"] == (7, 8)
    assert moved["2SEND_B0>0"] == (10, 14)
    assert moved["0SEND_TIED>2"][1] - moved["0SEND_TIED>2"][0] == 5
    assert timeline.makespan_s == moved["2SEND_TIED>0"][1] == moved["0SEND_TIED>2"][1]


def test_what_ranks_keep_is_weighed() -> None:
    schedule = make_schedule("ZB-H1", 2, 4)
    ours = peaks(schedule, Costs(live_bytes=(10, 100), pending_bytes=(4, 40)))
    assert [(peak.live, peak.pending, peak.held) for peak in ours] == [(2, 1, 2), (1, 2, 2)]
    assert [peak.num_bytes for peak in ours] == [20, 140]


def test_costs_are_shared_by_stages() -> None:
    costs = Costs(4, 6, 2, 7, message_bytes=9, live_bytes=8).split(2)
    assert (costs.forward_s, costs.backward_s, costs.message_bytes, costs.live_bytes) == (2, 3.5, 9, 4)
    assert Costs().split(2).backward_s is None
    assert Costs((1, 2)).split(1) == Costs((1, 2))
    with pytest.raises(ScheduleError, match="Measure the model in 2 stages per rank"):
        Costs((1, 2)).split(2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0,0B0\n1B0,1F0", "does not come to its end: rank 0 waits for ever at 0B0"),
        (
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1",
            "crosses messages from rank 0 to 1: 0SEND_F0 meets 1RECV_F1",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        simulate(from_csv(text))


def test_nothing_to_do_takes_no_time() -> None:
    timeline = simulate(make_schedule("1F1B", 1, 1).with_ranks([[]]))
    assert (timeline.makespan_s, timeline.bubble, timeline.idle_s) == (0, 0, (0,))
    assert Link(2, math.inf).transfer_s(1e30) == 2


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        (lambda: Costs(forward_s=-1), "forward_s is -1. Give a finite number that is not negative."),
        (lambda: Costs(backward_s=(1, math.nan)), "backward_s is nan. Give a finite number that is not negative."),
        (lambda: Costs(overlap_saves=1.5), "overlap_saves is 1.5. Give a share from 0 to 1."),
        (lambda: Link(bytes_per_s=0), "Give a latency from 0 on, and a bandwidth above 0."),
        (lambda: simulate(from_csv(CHAIN), Costs((1, 2, 3))), "forward_s has 3 values, the schedule 2 stages."),
        (lambda: peaks(make_schedule("1F1B", 2, 2), Costs(live_bytes=(1,))), "live_bytes has 1 values"),
        (lambda: lower(make_schedule("1F1B", 2, 2), costs=Costs(0)), "0F0 takes no time, so nobody can tell"),
    ],
)
def test_costs_that_cannot_be(wrong: Callable[[], object], answer: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(answer)):
        wrong()


def test_transfers_that_start_at_once_are_in_the_order_of_ranks() -> None:
    """However the play goes round the ranks."""
    transfers = simulate(make_schedule("1F1B", 4, 8)).transfers
    order = [(transfer.start_s, transfer.from_rank, transfer.to_rank) for transfer in transfers]
    assert order == sorted(order)
    assert len({start_s for start_s, _, _ in order}) < len(order)


@pytest.mark.parametrize("name", ["V-Half", "V-Min"])
def test_a_block_may_keep_more_than_its_bound_where_it_has_no_weight_to_run(name: str) -> None:
    """A rank that waited for room would wait for ever: gradients come back only to what has gone forward."""
    for num_ranks, num_microbatches in ((1, 1), (2, 9), (5, 3), (8, 17)):
        verify(make_schedule(name, num_ranks, num_microbatches))
