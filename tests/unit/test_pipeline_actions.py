"""Actions, placements and schedules as text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.errors import ScheduleError
from disttrain.pipelining import (
    Action,
    Op,
    Placement,
    Schedule,
    Wiring,
    from_csv,
    lower,
    make_schedule,
    parse_action,
    to_csv,
)
from disttrain.pipelining.schedule.action import MESSAGES, OF_ONE_STAGE, TIED

_counts = st.integers(0, 10_000)


@st.composite
def _simple(draw: st.DrawFn) -> Action:
    op = draw(st.sampled_from([op for op in Op if op is not Op.OVERLAP]))
    microbatch = None if op in OF_ONE_STAGE | TIED else draw(_counts)
    return Action(op, draw(_counts), microbatch, draw(_counts) if op in MESSAGES else None)


_compute_ops = st.sampled_from([Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT])
_compute = st.tuples(_compute_ops, _counts, _counts).map(lambda fields: Action(*fields))
_overlaps = st.lists(_compute, min_size=2, max_size=3).map(lambda parts: Action(Op.OVERLAP, -1, children=tuple(parts)))


@given(_simple() | _overlaps)
def test_a_text_is_read_back(action: Action) -> None:
    assert parse_action(str(action)) == action
    assert hash(parse_action(str(action))) == hash(action)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Op.FORWARD, 2, 0)),
        (" 10W3 ", Action(Op.BACKWARD_WEIGHT, 10, 3)),
        ("1UNSHARD", Action(Op.UNSHARD, 1)),
        ("3SEND_F1", Action(Op.SEND_F, 3, 1, 4)),
        ("3RECV_F1", Action(Op.RECV_F, 3, 1, 2)),
        ("3SEND_B1", Action(Op.SEND_B, 3, 1, 2)),
        ("0SEND_F2>3", Action(Op.SEND_F, 0, 2, 3)),
        ("3RECV_TIED<0", Action(Op.RECV_TIED, 3, None, 0)),
        (
            "(2F4;5B1)OVERLAP_F_B",
            Action(Op.OVERLAP, -1, None, None, (Action(Op.FORWARD, 2, 4), Action(Op.BACKWARD, 5, 1))),
        ),
    ],
)
def test_texts(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["F", "0", "0X1", "0F", "0UNSHARD1", "-1F0", "0F0>1", "0SEND_F0<1", "0RECV_F0>1", "0SEND_TIED", "0OVERLAP_F_B1",
     "()OVERLAP_F_B", "(0F0;)OVERLAP_F_B", "(0F0;1B0", "(0F0;1B0)F", "0F0 1", "٣F٣x"],
)  # fmt: skip
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"is no action\. Write stage, kind and microbatch, such as 2F0"):
        parse_action(text)


def test_both_ends_of_a_message() -> None:
    send = parse_action("0SEND_F2>3")
    assert str(send.other_end) == "3RECV_F2<0"
    assert send.other_end.other_end == send


def test_placements() -> None:
    assert Placement.loop(3, 2).ranks == (0, 1, 2, 0, 1, 2)
    assert Placement.v(3, 3).ranks == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert Placement.v(3).stages == ((0, 5), (1, 4), (2, 3))
    custom = Placement((0, 0, 1))
    assert [Placement.loop(2, 2).kind, Placement.v(2).kind, custom.kind] == ["loop", "v", "custom"]
    with pytest.raises(ScheduleError, match="leaves a rank without a stage"):
        Placement((0, 2))


def test_wiring_is_checked() -> None:
    with pytest.raises(ScheduleError, match="The skip from stage 1 to 2 does not skip a stage"):
        Wiring(skips=((1, 2),))
    with pytest.raises(ScheduleError, match="fewer than two stages"):
        Wiring(ties=((1, 1),))
    with pytest.raises(ScheduleError, match="is wired to stage 4, and has 4 stages"):
        lower(make_schedule("1F1B", 4, 4), wiring=Wiring(ties=((0, 4),)))
    with pytest.raises(ScheduleError, match="has actions for 1 ranks, its placement 2"):
        Schedule("Short", Placement.loop(2), 1, ((),))


WIRED = Wiring(skips=((0, 3), (1, 3)), ties=((0, 3),))


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipeV", "ForwardOnly"])
@pytest.mark.parametrize("wiring", [Wiring(), WIRED])
def test_csv_is_read_back(name: str, wiring: Wiring) -> None:
    num_ranks = 4 if name in ("1F1B", "ForwardOnly") else 2
    schedule = lower(make_schedule(name, num_ranks, 4), wiring=wiring)
    read = from_csv(to_csv(schedule), schedule.name)
    assert (read.ranks, read.placement, read.num_microbatches) == (schedule.ranks, schedule.placement, 4)
    assert read.has_backward == schedule.has_backward
    assert to_csv(read) == to_csv(schedule)
    if name == "1F1B":
        assert read == schedule


def test_csv_may_have_idle_cells() -> None:
    schedule = from_csv('0F0,,0F1,,"0B0",0B1\r\n,1F0,1B0,1F1,1B1,\r\n\n')
    assert to_csv(schedule) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (schedule.placement.ranks, schedule.num_microbatches) == ((0, 1), 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0,0G0", r"from_csv: '0G0' is no action\. .* \[row 0, cell 1\]"),
        ("0F0\n1B0", "Rank 1 has no forward"),
        ("0F0\n2F0", "Stage 1 has no forward"),
        ("99999999999F0", "Stage 0 has no forward"),
        ("", "Stage 0 has no forward"),
        ("0F0," + "9" * 200_000, "This is no CSV: field larger than field limit"),
    ],
)
def test_csv_that_is_no_schedule_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        from_csv(text)
