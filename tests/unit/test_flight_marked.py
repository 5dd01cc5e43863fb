"""Hangs on GPUs whose marks say how far each device has come."""

from __future__ import annotations

from dataclasses import replace

from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.analysis.verdict import Cause, Kind, Verdict
from disttrain.flight_recorder.dumps.dump import RING, Dump
from disttrain.flight_recorder.dumps.words import EXIT
from disttrain.flight_recorder.record.record import DeviceTimes
from tests.unit.flight_ranks import NOW_S, Rank

READ_LOSS = 40


def _judge(*dumps: Dump) -> Verdict:
    return judge(match(dumps))[0]


def _marked(dump: Dump, num_left: int, num_come: int | None = None, since_s: float = 20.0) -> Dump:
    """Its device has left the first `num_left` of its operations, and may be in all others that it has come to: one
    more, or `num_come`. Of every second one it is marked when it was left."""
    num_come = num_left + 1 if num_come is None else num_come
    records = []
    for place, record in enumerate(dump.records):
        times = [NOW_S - since_s] if place < num_come else []
        if place < num_left:
            times = [record.enqueued_s + 0.1, *([record.enqueued_s + 0.2] if place % 2 else [])]
        records.append(record._replace(device=DeviceTimes(*times)))
    return replace(dump, records=tuple(records))


def _trained(rank: int, num_steps: int = 5) -> Rank:
    calls = Rank(rank)
    for _ in range(num_steps):
        calls.call("broadcast", peer=0).call("all_reduce")
    return calls


def test_a_rank_that_has_not_come() -> None:
    """The others' hosts have left the all_reduce, and run ahead for two more."""
    others = [_trained(rank).call("all_reduce", at=12).call("all_reduce", at=13).dump(READ_LOSS) for rank in (0, 2)]
    first, second = (_marked(dump, 10) for dump in others)
    verdict = _judge(first, _marked(_trained(1).dump(at=33), 10), second)
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (1,), Cause.IN_PYTHON)
    assert "did not come to all_reduce #11 of group world" in verdict.summary
    assert verdict.evidence[0].endswith(
        " at /job/train.py:12 in step, in it on its device for 20.0 s when it was dumped"
    )


def test_a_device_that_has_not_come() -> None:
    dumps = [_trained(rank).call("all_reduce", at=12).dump(READ_LOSS) for rank in range(3)]
    verdict = _judge(_marked(dumps[0], 10), _marked(dumps[1], 10, 10), _marked(dumps[2], 10))
    assert (verdict.kind, verdict.ranks) == (Kind.NEVER_STARTED, (1,))
    assert verdict.summary == (
        "All_reduce #11 of group world (float32[4]) has not begun on the device of rank 1: what was queued before does "
        "not end. It was called at /job/train.py:12 in step."
    )
    assert verdict.evidence[-1] == (
        "rank 1: the last that its device has come to before is all_reduce #10 of group world (float32[4]) at "
        "/job/train.py:10 in step"
    )


def test_who_waits_for_such_a_device_is_not_to_blame() -> None:
    """Rank 1 waits for the message of rank 0, and rank 2 for both."""
    sends = _trained(0).waits("send", at=70, peer=1).dump()
    takes = _trained(1).call("recv", at=71, peer=0).call("all_reduce", at=12).dump(READ_LOSS)
    other = _trained(2).call("all_reduce", at=12).dump(READ_LOSS)
    verdict = _judge(_marked(sends, 10, 10), _marked(takes, 10), _marked(other, 10))
    assert (verdict.kind, verdict.ranks) == (Kind.NEVER_STARTED, (0,))


def test_no_device_has_come() -> None:
    dumps = [_marked(_trained(rank).waits("all_reduce", at=12).dump(), 10, 10) for rank in range(3)]
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.NEVER_STARTED, (0, 1, 2))


def test_devices_that_are_behind_for_a_moment() -> None:
    dumps = [_trained(rank).call("all_reduce", at=12).dump(READ_LOSS) for rank in range(3)]
    ahead = [_marked(dump, 10, since_s=0.5) for dump in dumps]
    assert _judge(ahead[0], _marked(dumps[1], 10, 10), ahead[2]).kind is Kind.NOTHING_WRONG


def test_hosts_that_run_ahead() -> None:
    """The devices have done what all have called."""
    dumps = [_marked(_trained(rank).dump(at=READ_LOSS), 10) for rank in range(3)]
    assert _judge(*dumps).kind is Kind.NOTHING_WRONG


def test_a_rank_that_has_ended_comes_no_more() -> None:
    others = [_marked(_trained(rank).call("all_reduce").dump(at=READ_LOSS), 10) for rank in (0, 2)]
    verdict = _judge(others[0], _marked(_trained(1).dump(at=50, reason=EXIT), 10), others[1])
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (1,), Cause.ENDED)


def test_a_device_that_is_held_up_behind_what_others_have_left() -> None:
    """Nobody has marked when its device left the last that it came to, which all have come to."""
    dumps = [_trained(rank).call("all_reduce", at=12).dump(READ_LOSS) for rank in range(3)]
    marked = [_marked(dumps[0], 10), _marked(dumps[1], 9), _marked(dumps[2], 10)]
    verdict = _judge(*(replace(dump, device_is_busy=True) for dump in marked))
    assert (verdict.kind, verdict.ranks) == (Kind.NEVER_STARTED, (1,))


def _stopped_in_a_mesh(num_left: dict[int, int]) -> list[Dump]:
    """Rank 3 of a mesh of 2 x 2 is stopped: its host had come to the last of all, and its marks are lost."""
    rows, columns = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    dumps = []
    for rank in range(4):
        calls = Rank(rank, 4)
        for group in (rows[rank], columns[rank], rows[rank], columns[rank]):
            calls.call("all_reduce", group=group)
        dump = calls.dump(at=READ_LOSS)
        if rank == 3:
            dumps.append(replace(dump, reason=RING, threads=(), dumped_s=NOW_S - 20))
        else:
            dumps.append(replace(_marked(dump, num_left[rank]), device_is_busy=True))
    return dumps


def test_who_is_stopped_behind_what_its_host_has_come_to() -> None:
    """The device of rank 1 is in the first of its column, and that of rank 0 in a row that rank 1 does not come to."""
    verdict = _judge(*_stopped_in_a_mesh({0: 2, 1: 1, 2: 2}))
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (3,), Cause.STOPPED)


def test_a_device_that_is_past_what_it_had_with_the_stopped() -> None:
    """All are in what they have with each other; whoever is gone has no part in that."""
    kinds = {verdict.kind for verdict in judge(match(_stopped_in_a_mesh({0: 2, 1: 2, 2: 3})))}
    assert Kind.RANK_ABSENT not in kinds


def test_what_some_may_leave_first_holds_up_nobody() -> None:
    others = [_marked(_trained(rank).call("broadcast", peer=0).dump(at=READ_LOSS), 10) for rank in (0, 2)]
    assert _judge(others[0], _marked(_trained(1).dump(at=33), 10), others[1]).kind is Kind.NOTHING_WRONG


def test_a_rank_without_a_dump() -> None:
    """It may have come to all that the others have."""
    first, second = (_marked(_trained(rank).dump(at=READ_LOSS), 9) for rank in (0, 2))
    assert _judge(first, second).kind is Kind.NOT_ENOUGH_DATA
    verdict = _judge(replace(first, device_is_busy=True), second)
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))


def test_a_message_that_nobody_sends() -> None:
    dumps = [
        _marked(_trained(0).call("recv", peer=1).dump(at=READ_LOSS), 10),
        *(_marked(_trained(rank).dump(at=50, reason=EXIT), 10) for rank in (1, 2)),
    ]
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.MISSING_SEND, (1,))


def test_two_groups_in_another_order() -> None:
    """All hosts have come to all collectives; the devices stand crosswise."""
    orders = {0: ((0, 1), (0, 1, 2)), 1: ((0, 1, 2), (0, 1)), 2: ((0, 1, 2),)}
    dumps = []
    for rank, groups in orders.items():
        calls = _trained(rank)
        for group in groups:
            calls.call("all_reduce", group=group)
        dumps.append(_marked(calls.dump(at=READ_LOSS), 10))
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
        dumps.append(_marked(calls.dump(at=READ_LOSS), 10))
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.WAIT_CYCLE, (0, 1, 2))


def test_all_devices_have_come_and_none_leaves() -> None:
    dumps = [_marked(_trained(rank).dump(at=READ_LOSS), 9) for rank in range(3)]
    assert _judge(*dumps).kind is Kind.NOTHING_WRONG
    verdict = _judge(*(replace(dump, device_is_busy=True) for dump in dumps))
    assert (verdict.kind, verdict.ranks) == (Kind.NETWORK, (0, 1, 2))


def test_a_slow_device() -> None:
    """Hosts are through at once; the device of rank 2 comes half a second later, each time."""
    dumps = []
    for rank in range(3):
        calls = Rank(rank)
        for _ in range(12):
            calls.call("all_reduce", age_s=30.0)
        dump = calls.dump(at=READ_LOSS)
        records = []
        for number, record in enumerate(dump.records):
            left_s = NOW_S - 20 + 0.5 * number
            came_s = left_s - (0.01 if rank == 2 else 0.49)
            records.append(record._replace(device=DeviceTimes(came_s, left_s)))
        dumps.append(replace(dump, records=tuple(records)))
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.STRAGGLER, (2,))
    unknown = replace(dumps[0], records=tuple(record._replace(device=None) for record in dumps[0].records))
    assert _judge(unknown, *dumps[1:]).kind is Kind.NOTHING_WRONG
