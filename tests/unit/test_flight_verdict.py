"""What the analyzer concludes from dumps of jobs that go wrong in every way on its list."""

from __future__ import annotations

import pytest

from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import Failure, State
from tests.unit.flight_ranks import Rank, line

Found = tuple[Kind, tuple[int, ...]]


def _judge(*dumps: Dump) -> list[Verdict]:
    return judge(match(dumps))


def _found(*dumps: Dump) -> list[Found]:
    return [(verdict.kind, verdict.ranks) for verdict in _judge(*dumps)]


def _healthy(rank: int, world_size: int = 3) -> Rank:
    return Rank(rank, world_size).call("broadcast", 5, peer=0).call("all_reduce", 10).call("all_reduce", 10)


def test_no_dump_at_all() -> None:
    assert _found() == [(Kind.NOT_ENOUGH_DATA, ())]


def test_a_job_that_ended_well() -> None:
    assert _found(*(_healthy(rank).dump(at=20, reason="exit") for rank in range(3))) == [(Kind.NOTHING_WRONG, ())]


def test_ranks_that_are_dumped_while_they_move_are_no_hang() -> None:
    dumps = [_healthy(rank).waits("all_reduce", age_s=0.2).dump() for rank in (0, 1)]
    assert _found(*dumps, _healthy(2).dump(at=20)) == [(Kind.NOTHING_WRONG, ())]


def test_an_operation_that_nobody_waits_for_is_no_hang() -> None:
    dumps = [_healthy(rank).waits("all_reduce").dump(at=20) for rank in (0, 1)]
    assert _found(*dumps, _healthy(2).dump(at=20)) == [(Kind.NOTHING_WRONG, ())]


def test_a_failure_that_was_got_over_is_no_hang() -> None:
    def dump(rank: int) -> Dump:
        failed = Rank(rank).call("all_reduce", state=State.FAILED, error="timed out")
        return failed.call("all_reduce").dump(at=20)

    assert _found(*map(dump, range(3))) == [(Kind.NOTHING_WRONG, ())]


def test_dumps_of_some_ranks_do_not_tell_about_the_others() -> None:
    assert _found(_healthy(0).dump(at=20), _healthy(2).dump(at=20)) == [(Kind.NOT_ENOUGH_DATA, ())]


def test_a_rank_that_is_in_python() -> None:
    (verdict,) = _judge(
        _healthy(0).waits("all_reduce", 11).dump(), _healthy(1).dump(at=33), _healthy(2).waits("all_reduce", 11).dump()
    )
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert verdict.summary == (
        "Rank 1 did not come to all_reduce #4 of group world (float32[4]), where ranks 0, 2 waited at "
        "/job/train.py:11 in step: it is in Python at /job/train.py:33 in load."
    )
    assert "for 30.0 s" in verdict.evidence[0]


def test_a_rank_whose_ring_has_lost_the_call_has_come() -> None:
    late = _healthy(2)
    for _ in range(5):
        late.call("all_reduce")
    late.records = late.records[-1:]
    early = [_healthy(rank).waits("all_reduce").dump() for rank in (0, 1)]
    assert _found(*early, late.dump(at=20)) == [(Kind.NOT_ENOUGH_DATA, ())]


def test_a_rank_without_a_dump() -> None:
    (verdict,) = _judge(*(_healthy(rank).waits("all_reduce").dump() for rank in (0, 2)))
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert "there is no dump" in verdict.summary


@pytest.mark.parametrize("error", ["Connection closed by peer [10.0.0.2]", "timed out"])
def test_a_broken_connection_points_to_the_rank_that_left_no_dump(error: str) -> None:
    dumps = [
        _healthy(rank, 4).call("all_reduce", state=State.FAILED, took_s=9.0, error=error).dump(at=11) for rank in (0, 1)
    ]
    gone, in_python = (Kind.RANK_ABSENT, (3,)), (Kind.RANK_ABSENT, (2,))
    expected = [gone, in_python] if "closed" in error else [in_python, gone]
    assert _found(*dumps, _healthy(2, 4).dump(at=33)) == expected


def test_a_rank_that_raised() -> None:
    failure = Failure("ValueError", "bad batch", (line(44, "load"),))
    dumps = [_healthy(rank).waits("all_reduce").dump() for rank in (0, 2)]
    (verdict,) = _judge(*dumps, _healthy(1).dump(at=1, reason="uncaught exception", failure=failure))
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert verdict.summary.endswith("it ended with ValueError (bad batch) at /job/train.py:44 in load.")


def test_of_ranks_that_raised_alike_it_is_said_what_the_first_ended_with() -> None:
    failure = Failure("ValueError", "bad batch", (line(44, "load"),))
    (verdict,) = _judge(*(_healthy(rank, 2).dump(reason="uncaught exception", failure=failure) for rank in range(2)))
    said = "Ranks 0, 1 ended early: rank 0 ended with ValueError (bad batch) at /job/train.py:44 in load."
    assert verdict.summary == said


def test_who_waits_for_a_rank_that_waits_is_not_to_blame() -> None:
    """Rank 0 waits for 1, which waits in another group for 2, which is in Python."""
    verdicts = _judge(
        Rank(0).call("barrier").waits("all_reduce", group=(0, 1)).dump(),
        Rank(1).call("barrier").waits("all_reduce", group=(1, 2)).dump(),
        Rank(2).call("barrier").dump(at=33),
    )
    assert [(verdict.kind, verdict.ranks) for verdict in verdicts] == [(Kind.RANK_ABSENT, (2,))]
    assert "rank 0 wait for ranks that wait" in verdicts[0].evidence[-1]


def test_lines_that_differ_show_where_a_rank_left_out_a_call() -> None:
    """Rank 1 leaves out its second call of line 10 and so is one call ahead of the others until its end."""

    def dump(rank: int) -> Dump:
        calls = Rank(rank).call("all_reduce", 10)
        if rank == 1:
            return calls.call("all_reduce", 11).dump(at=20, reason="exit")
        return calls.call("all_reduce", 10).waits("all_reduce", 11).dump()

    (verdict,) = _judge(*map(dump, range(3)))
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert verdict.evidence[-1] == (
        "ranks called from different lines first in #2 of group world: ranks 0, 2 at /job/train.py:10 in step; "
        "rank 1 at /job/train.py:11 in step"
    )


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        (Kind.MISMATCHED_OPERATION, {"operation": "barrier"}),
        (Kind.MISMATCHED_SIZES, {"shape": (5,)}),
        (Kind.MISMATCHED_DTYPE, {"dtype": "int32"}),
        (Kind.MISMATCHED_ROOT, {"peer": 2}),
    ],
)
def test_a_rank_that_calls_something_else(kind: Kind, odd: dict[str, object]) -> None:
    usual: dict[str, object] = {"operation": "broadcast", "peer": 0}
    dumps = [
        _healthy(rank).waits(**(usual | odd if rank == 1 else usual), at=12 if rank == 1 else 11).dump()  # type: ignore[arg-type]
        for rank in range(3)
    ]
    (verdict,) = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (kind, (1,))
    assert "rank 1 " in verdict.summary
    assert "/job/train.py:12 in step" in verdict.summary


def test_equal_sizes_in_other_shapes_fit() -> None:
    dumps = [_healthy(rank).call("all_reduce", shape=(2, 2) if rank else (4,)).dump(at=20) for rank in range(3)]
    (verdict,) = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.NOTHING_WRONG, ())
    assert verdict.evidence == (
        (
            "ranks called other shapes, of as many elements, as #4 of group world: rank 0 all_reduce of float32[4] at "
            "/job/train.py:10 in step; ranks 1, 2 all_reduce of float32[2, 2] at /job/train.py:10 in step"
        ),
    )


@pytest.mark.parametrize(
    ("kind", "odd"),
    [(Kind.MISMATCHED_DTYPE, {"dtype": "int32"}), (Kind.MISMATCHED_REDUCTION, {"reduction": "MAX"})],
)
def test_calls_that_do_not_fit_and_have_ended(kind: Kind, odd: dict[str, str]) -> None:
    dumps = [_healthy(rank).call("all_reduce", **(odd if rank == 2 else {})).dump(at=20) for rank in range(3)]  # type: ignore[arg-type]
    (verdict,) = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (kind, (2,))
    assert ("all_reduce MAX of float32[4]" in verdict.summary) == ("reduction" in odd)


def test_parts_of_other_sizes() -> None:
    rows = {0: ((1, 2, 1), (1, 3, 0)), 1: ((3, 1, 0), (2, 1, 1)), 2: ((0, 1, 3), (1, 1, 2))}
    dumps = [
        Rank(rank).call("all_to_all_single", shape=(4,), splits=splits).dump(at=20) for rank, splits in rows.items()
    ]
    (verdict,) = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.MISMATCHED_SIZES, (1, 2))
    assert "rank 2 sends 1 rows to rank 1, which expects 0: rank 2 all_to_all_single" in verdict.summary
    rows[1] = ((3, 1, 1), (2, 1, 1))
    rows[2] = ((0, 1, 2), (1, 1, 2))
    dumps = [Rank(rank).call("all_to_all_single", splits=splits).dump(at=20) for rank, splits in rows.items()]
    assert _found(*dumps) == [(Kind.NOTHING_WRONG, ())]


def test_of_two_ranks_the_one_with_the_new_call_is_odd() -> None:
    dumps = [
        _healthy(0, 2).waits("all_reduce", 10).dump(),
        _healthy(1, 2).waits("barrier", 15).dump(),
    ]
    assert _found(*dumps) == [(Kind.MISMATCHED_OPERATION, (1,))]


def test_of_two_ranks_with_new_calls_either_may_be_odd() -> None:
    dumps = [_healthy(0, 2).waits("broadcast", 14, peer=0).dump(), _healthy(1, 2).waits("barrier", 15).dump()]
    assert _found(*dumps) == [(Kind.MISMATCHED_OPERATION, (0, 1))]


def test_one_group_in_another_order() -> None:
    def dump(rank: int) -> Dump:
        first, second = ("barrier", "all_reduce") if rank == 1 else ("all_reduce", "barrier")
        return _healthy(rank).waits(first).waits(second).dump()

    assert _found(*map(dump, range(3))) == [(Kind.WRONG_ORDER, (1,))]


def test_two_groups_in_another_order() -> None:
    """Ranks 0 and 1 first meet in (0, 1), rank 2 wants to meet 1 first, and 1 and 0 wait for each other's group."""
    verdicts = _judge(
        Rank(0).call("barrier").waits("all_reduce", 21, group=(0, 1)).dump(),
        Rank(1).call("barrier").waits("all_reduce", 22, group=(0, 1, 2)).dump(),
        Rank(2).call("barrier").waits("all_reduce", 22, group=(0, 1, 2)).dump(),
    )
    assert [(verdict.kind, verdict.ranks) for verdict in verdicts] == [(Kind.WRONG_ORDER, (0, 1))]
    assert "rank 0 waits for rank 1 in all_reduce #1 of group 0-1" in verdicts[0].evidence[0]


def test_the_fewer_are_to_blame_for_a_circle() -> None:
    dumps = [Rank(rank).waits("all_reduce", 22, group=(0, 1, 2)).dump() for rank in (1, 2)]
    first = Rank(0).waits("all_reduce", 21, group=(2, 1, 0)).dump()
    assert _found(first, *dumps) == [(Kind.WRONG_ORDER, (0,))]


def test_a_send_that_was_left_out() -> None:
    dumps = [_healthy(0).waits("recv", 11, peer=1).dump(), _healthy(1).waits("barrier", 12).dump()]
    dumps.append(_healthy(2).waits("barrier", 12).dump())
    assert _found(*dumps) == [(Kind.MISSING_SEND, (1,))]


def test_a_send_that_was_left_out_until_the_end() -> None:
    dumps = [_healthy(0, 2).waits("recv", 11, peer=1).dump(), _healthy(1, 2).dump(at=40, reason="exit")]
    assert _found(*dumps) == [(Kind.MISSING_SEND, (1,))]


def test_a_receive_that_was_left_out() -> None:
    dumps = [_healthy(0, 2).waits("send", 11, peer=1).dump(), _healthy(1, 2).waits("barrier", 12).dump()]
    assert _found(*dumps) == [(Kind.MISSING_RECEIVE, (1,))]


def test_both_receive_first() -> None:
    dumps = [_healthy(rank, 2).waits("recv", 11, peer=1 - rank).dump() for rank in range(2)]
    assert _found(*dumps) == [(Kind.MISSING_SEND, (0, 1))]


def test_a_pipeline_waits_for_the_stage_that_is_past_its_send() -> None:
    dumps = [
        Rank(0).waits("recv", 11, peer=1).dump(),
        Rank(1).waits("recv", 11, peer=2).dump(),
        Rank(2).waits("barrier", 12).dump(),
    ]
    assert _found(*dumps) == [(Kind.MISSING_SEND, (2,))]


def test_a_message_of_another_size() -> None:
    dumps = [
        _healthy(0, 2).waits("send", 11, peer=1, shape=(8,)).dump(),
        _healthy(1, 2).waits("recv", 12, peer=0, shape=(4,)).dump(),
    ]
    assert _found(*dumps) == [(Kind.MISMATCHED_SIZES, (0, 1))]


def test_a_straggler_waits_least_whatever_the_clocks_say() -> None:
    def dump(rank: int) -> Dump:
        calls = Rank(rank)
        for step in range(10):
            age_s = 50.0 - step - 600.0 * rank
            calls.call("all_reduce", age_s=age_s if rank == 2 else age_s + 0.5, took_s=0.01 if rank == 2 else 0.51)
        return calls.dump(at=20)

    (verdict,) = _judge(*map(dump, range(3)))
    assert (verdict.kind, verdict.ranks) == (Kind.STRAGGLER, (2,))
    (evidence,) = verdict.evidence
    assert "rank 2 worked 6.93 s of 9.00 s on record" in evidence
    assert evidence.endswith("of their time worked rank 0 38%, rank 1 38%, rank 2 77%")


def test_who_waits_for_the_straggler_is_none() -> None:
    """On a mesh its lateness goes on: rank 1 waits for rank 2 in one group, and rank 0 for rank 1 in the next."""
    ranks = [Rank(rank) for rank in range(3)]
    for number in range(10):
        age_s = 30.0 - 2 * number
        ranks[1].call("all_reduce", group=(1, 2), age_s=age_s, took_s=0.5)
        ranks[2].call("all_reduce", group=(1, 2), age_s=age_s - 0.5, took_s=0.001)
        ranks[0].call("all_reduce", group=(0, 1), age_s=age_s, took_s=0.52)
        ranks[1].call("all_reduce", group=(0, 1), age_s=age_s - 0.51, took_s=0.001)
    assert _found(*(rank.dump(at=20) for rank in ranks)) == [(Kind.STRAGGLER, (2,))]


def test_two_pauses_make_no_straggler() -> None:
    ranks = [Rank(rank, 2) for rank in range(2)]
    for number in range(12):
        late_s = 1.0 if number in (3, 9) else 0.0
        ranks[0].call("all_reduce", group=(0, 1), age_s=8 - number / 2, took_s=late_s + 0.001)
        ranks[1].call("all_reduce", group=(0, 1), age_s=8 - number / 2 - late_s, took_s=0.001)
    assert _found(*(rank.dump(at=20) for rank in ranks)) == [(Kind.NOTHING_WRONG, ())]


def test_a_few_hundredths_of_a_second_make_no_straggler() -> None:
    def dump(rank: int) -> Dump:
        calls = Rank(rank)
        for step in range(20):
            calls.call("all_reduce", age_s=5 - step * 0.01, took_s=0.001 if rank == 2 else 0.006)
        return calls.dump(at=20)

    assert _found(*map(dump, range(3))) == [(Kind.NOTHING_WRONG, ())]


def test_collectives_under_way_together_lose_no_second_twice() -> None:
    def dump(rank: int) -> Dump:
        calls = Rank(rank)
        for step in range(40):
            calls.call("all_reduce", age_s=5 - step * 0.001, took_s=0.001 if rank == 2 else 0.2)
        return calls.dump(at=20)

    assert _found(*map(dump, range(3))) == [(Kind.NOTHING_WRONG, ())]


def test_who_came_when_the_others_had_given_up() -> None:
    def dump(rank: int) -> Dump:
        took_s, error = (0.01, "Connection closed by peer") if rank == 1 else (10.0, "timed out")
        return _healthy(rank).call("all_reduce", state=State.FAILED, took_s=took_s, error=error).dump(at=11)

    assert _found(*map(dump, range(3))) == [(Kind.STRAGGLER, (1,))]


def test_all_came_and_none_left() -> None:
    assert _found(*(_healthy(rank).waits("all_reduce").dump() for rank in range(3))) == [(Kind.NETWORK, (0, 1, 2))]


def test_the_first_collective_of_a_group_is_not_on_record_yet() -> None:
    (verdict,) = _judge(*(_healthy(rank).dump() for rank in (0, 2)), _healthy(1).dump(at=33))
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert verdict.summary.endswith("waited: it is in Python at /job/train.py:33 in load.")
