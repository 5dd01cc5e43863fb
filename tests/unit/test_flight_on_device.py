"""Hangs on GPUs, where the host has left the collective that its device hangs in."""

from __future__ import annotations

from dataclasses import replace

from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.analysis.verdict import Cause, Kind, Verdict
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.dumps.words import EXIT
from tests.unit.flight_ranks import Rank

READ_LOSS = 40


def _judge(*dumps: Dump) -> Verdict:
    return judge(match(dumps))[0]


def _busy(rank: Rank) -> Dump:
    """The host stands where it reads the loss; the device has not come to its end."""
    return replace(rank.dump(at=READ_LOSS), device_is_busy=True)


def _trained(rank: int, num_steps: int = 5) -> Rank:
    calls = Rank(rank)
    for _ in range(num_steps):
        calls.call("broadcast", peer=0).call("all_reduce")
    return calls


def test_a_rank_that_has_not_come() -> None:
    """The others' hosts have left the all_reduce, and run ahead for two more."""
    others = [_busy(_trained(rank).call("all_reduce", at=12).call("all_reduce", at=13)) for rank in (0, 2)]
    verdict = _judge(others[0], _trained(1).dump(at=33), others[1])
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (1,), Cause.IN_PYTHON)
    assert "did not come to all_reduce #11 of group world" in verdict.summary
    assert (
        "ranks 0, 2: all_reduce #11 of group world (float32[4]) at /job/train.py:12 in step, queued"
        in (verdict.evidence[0])
    )


def test_a_rank_whose_own_kernel_does_not_end() -> None:
    """Its device is as busy as the others', but its host has not come to what they wait in."""
    others = [_busy(_trained(rank).call("all_reduce", at=12)) for rank in (0, 2)]
    absent = _busy(_trained(1))
    (main,) = absent.threads
    absent = replace(absent, threads=(replace(main, activity="running"),))
    verdict = _judge(others[0], absent, others[1])
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (1,), Cause.IN_KERNEL)


def test_without_a_busy_device_hosts_only_run_ahead() -> None:
    ahead = [_trained(rank).call("all_reduce").dump(at=READ_LOSS) for rank in (0, 2)]
    assert _judge(ahead[0], _trained(1).dump(at=33), ahead[1]).kind is Kind.NOTHING_WRONG


def test_a_rank_that_has_ended_comes_no_more() -> None:
    dumps = [_trained(rank).call("all_reduce").dump(at=READ_LOSS, reason=EXIT) for rank in (0, 2)]
    verdict = _judge(dumps[0], _trained(1).dump(at=50, reason=EXIT), dumps[1])
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (1,), Cause.ENDED)


def test_what_some_may_leave_first_holds_up_nobody() -> None:
    dumps = [_trained(rank).call("broadcast", peer=0).dump(at=READ_LOSS, reason=EXIT) for rank in (0, 2)]
    assert _judge(dumps[0], _trained(1).dump(at=50, reason=EXIT), dumps[1]).kind is Kind.NOTHING_WRONG


def test_a_message_that_nobody_sends() -> None:
    dumps = [
        _busy(_trained(0).call("recv", peer=1)),
        _trained(1).dump(at=50, reason=EXIT),
        _trained(2).dump(at=50, reason=EXIT),
    ]
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.MISSING_SEND, (1,))


def test_two_groups_in_another_order() -> None:
    """All hosts have come to all collectives; the devices stand crosswise."""
    orders = {0: ((0, 1), (0, 1, 2)), 1: ((0, 1, 2), (0, 1))}
    dumps = []
    for rank, groups in orders.items():
        calls = _trained(rank)
        for group in groups:
            calls.call("all_reduce", group=group)
        dumps.append(_busy(calls))
    dumps.append(_busy(_trained(2).call("all_reduce", group=(0, 1, 2))))
    verdict = _judge(*dumps)
    assert verdict.kind is Kind.WRONG_ORDER
    assert 0 in verdict.ranks


def test_a_circle_over_three_groups() -> None:
    pairs = [(0, 1), (1, 2), (0, 2)]
    orders = {0: (0, 2), 1: (1, 0), 2: (2, 1)}
    dumps = []
    for rank, order in orders.items():
        calls = _trained(rank)
        for place in order:
            calls.call("all_reduce", group=pairs[place])
        dumps.append(_busy(calls))
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.WAIT_CYCLE, (0, 1, 2))


def test_all_have_come_and_no_device_ends() -> None:
    verdict = _judge(*(_busy(_trained(rank)) for rank in range(3)))
    assert (verdict.kind, verdict.ranks) == (Kind.NETWORK, (0, 1, 2))


def test_one_device_that_is_busy_for_itself_is_no_hang() -> None:
    assert _judge(_busy(_trained(0)), _trained(1).dump(at=33), _trained(2).dump(at=33)).kind is Kind.NOTHING_WRONG
