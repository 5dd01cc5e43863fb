"""What the analyzer makes of an absent rank, of circles, of groups that differ, and of files from a live process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.analysis.verdict import Cause, Kind, Verdict
from disttrain.flight_recorder.dumps.dump import RING, Dump
from disttrain.flight_recorder.record.process.thread_state import activities
from disttrain.flight_recorder.record.record import DeviceTimes, Failure, Frame, GroupProgress, State, ThreadStack
from tests.unit.flight_ranks import NOW_S, Rank, line


def _judge(*dumps: Dump) -> Verdict:
    return judge(match(dumps))[0]


def _waiting(rank: int) -> Dump:
    return Rank(rank).call("barrier").waits("all_reduce", 11).dump()


def _absent(activity: str = "", file: str = "/job/train.py", **more: object) -> Dump:
    """Rank 1, which has not come."""
    dump = Rank(1).call("barrier").dump(at=33)
    stack = (Frame(file, 7, "inner"), *dump.main_stack)
    return replace(dump, threads=(ThreadStack("MainThread", True, stack, activity),), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("absent", "cause"),
    [
        (_absent("running"), Cause.IN_PYTHON),
        (_absent("clock_nanosleep"), Cause.IN_PYTHON),
        (_absent("futex"), Cause.IN_PYTHON),
        (_absent("read of pipe:[7]"), Cause.IN_IO),
        (_absent("disk"), Cause.IN_IO),
        (_absent(file="/usr/lib/python3.11/socket.py"), Cause.IN_IO),
        (_absent("running", device_is_busy=True), Cause.IN_KERNEL),
        (_absent(file="/site/torch/cuda/__init__.py", device_is_busy=True), Cause.IN_KERNEL),
        (_absent("read of pipe:[7]", device_is_busy=True), Cause.IN_IO),
        (_absent(file="/site/torch/cuda/__init__.py", device_is_busy=False), Cause.IN_KERNEL),
        (_absent("openat"), Cause.IN_IO),
        (_absent(reason=RING, process="gone"), Cause.DEAD),
        (_absent(reason=RING, process="stopped"), Cause.STOPPED),
        (_absent(reason=RING), Cause.HOLDS_LOCK),
        (replace(_absent(reason=RING, dumped_s=NOW_S - 20), threads=()), Cause.STOPPED),
        (_absent(reason="exit"), Cause.ENDED),
        (_absent(failure=Failure("ValueError", "bad", (line(3),))), Cause.RAISED),
        (replace(_absent(), threads=()), Cause.UNKNOWN),
    ],
)
def test_what_became_of_a_rank(absent: Dump, cause: Cause) -> None:
    verdict = _judge(_waiting(0), absent, _waiting(2))
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (1,), cause)
    assert verdict.advice == cause.advice


@pytest.mark.parametrize(
    ("name", "cause"), [("disttrain stop signals", Cause.IN_PYTHON), ("Thread-7 (evaluate)", Cause.CONNECTING)]
)
def test_threads_of_disttrain_wait_for_no_collective(name: str, cause: Cause) -> None:
    absent = _absent("running")
    inside = Frame(f"{absent.package}process_group/watching/stop_signals.py", 7, "read")
    threads = (*absent.threads, ThreadStack(name, False, (inside,)))
    assert _judge(_waiting(0), replace(absent, threads=threads), _waiting(2)).cause is cause


def test_a_rank_that_came_and_then_gave_no_sign_of_life() -> None:
    ring = replace(_waiting(1), reason=RING, threads=(), dumped_s=NOW_S - 20)
    verdict = _judge(_waiting(0), ring, _waiting(2))
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (1,), Cause.STOPPED)
    assert verdict.summary.startswith("Rank 1 came to all_reduce #2 of group world (float32[4]) but did not leave it")


def test_signs_of_life_are_compared_by_one_clock() -> None:
    """Rank 1's clock is ten minutes ahead: its last sign of life is old all the same; and the other way round."""
    ahead = replace(_waiting(1), reason=RING, threads=(), dumped_s=NOW_S + 580, clock_offset_s=-600.0)
    assert _judge(_waiting(0), ahead, _waiting(2)).cause is Cause.STOPPED
    behind = replace(_waiting(1), reason=RING, threads=(), dumped_s=NOW_S - 600, clock_offset_s=600.0)
    assert _judge(_waiting(0), behind, _waiting(2)).kind is Kind.NETWORK


def test_who_fails_since_another_has_failed_is_not_to_blame() -> None:
    cause = replace(_waiting(2), failure=Failure("ValueError", "bad", (line(3),)))
    victim = replace(_waiting(1), failure=Failure("ScheduleError", "another rank has failed: rank 2", (line(4),)))
    verdict = _judge(_waiting(0), victim, cause)
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (2,), Cause.RAISED)


def test_both_send_first() -> None:
    verdict = _judge(*(Rank(rank, 2).waits("send", 11, peer=1 - rank).dump() for rank in range(2)))
    assert (verdict.kind, verdict.ranks) == (Kind.CROSSED_SENDS, (0, 1))


def test_a_send_that_has_arrived_is_no_wait() -> None:
    verdict = _judge(
        Rank(0, 2).waits("send", 11, peer=1).waits("all_reduce").dump(),
        Rank(1, 2).call("recv", 11, peer=0).dump(at=33),
    )
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert "all_reduce" in verdict.summary


def test_a_circle_over_three_groups() -> None:
    pairs = [(0, 1), (1, 2), (0, 2)]
    verdict = _judge(*(Rank(rank).waits("all_reduce", group=pairs[rank]).dump() for rank in range(3)))
    assert (verdict.kind, verdict.ranks) == (Kind.WAIT_CYCLE, (0, 1, 2))
    assert len(verdict.evidence) == 3


def test_a_circle_of_a_send_and_a_receive() -> None:
    verdict = _judge(
        Rank(0).waits("send", 11, peer=1).dump(),
        Rank(1).waits("recv", 12, peer=2).dump(),
        Rank(2).waits("recv", 13, peer=0).dump(),
    )
    assert (verdict.kind, verdict.ranks) == (Kind.WAIT_CYCLE, (0, 1, 2))


def _connecting(rank: int, name: str, ranks: tuple[int, ...], stays_s: float = 20) -> Dump:
    dump = Rank(rank).call("barrier", age_s=stays_s).dump()
    return replace(dump, groups=(*dump.groups, GroupProgress(name, ranks, 0, "dp", "all_reduce")))


def test_ranks_that_wait_for_another_to_connect() -> None:
    late = Rank(2).call("barrier").dump(at=33)
    late = replace(late, groups=(*late.groups, GroupProgress("g", (0, 1, 2), 0, "dp")))
    verdict = _judge(_connecting(0, "g", (0, 1, 2)), _connecting(1, "g", (0, 1, 2)), late)
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (2,))
    assert "all_reduce #1 of group g (axis dp, ranks 0-2)" in verdict.summary
    assert "to connect" in verdict.evidence[0]


def test_all_connect_at_once() -> None:
    dumps = [_connecting(rank, "g", (0, 1, 2), stays_s=3) for rank in range(3)]
    assert _judge(*dumps).kind is Kind.NOTHING_WRONG
    dumps = [_connecting(rank, "g", (0, 1, 2)) for rank in range(3)]
    assert _judge(*dumps).kind is Kind.NETWORK


def test_a_group_that_a_rank_never_made() -> None:
    elsewhere = Rank(2).call("barrier").waits("all_reduce", 12).dump()
    verdict = _judge(_connecting(0, "g", (0, 1, 2)), _connecting(1, "g", (0, 1, 2)), elsewhere)
    assert (verdict.kind, verdict.ranks) == (Kind.DIFFERENT_GROUPS, (2,))
    assert "rank 2 has not made that group; of the same ranks it has made world" in verdict.evidence[0]


def test_who_is_missed_by_the_missing_only_is_not_to_blame() -> None:
    """Ranks 0 and 2 are a group, and so are 1 and 3; but rank 3 takes itself for a member of 2 and 3."""
    groups = {1: (1, 3), 3: (2, 3)}
    dumps = []
    for rank in range(4):
        calls = Rank(rank, 4).call("barrier")
        if rank in groups:
            dump = calls.dump()
            name = "-".join(map(str, groups[rank]))
            dump = replace(dump, groups=(*dump.groups, GroupProgress(name, groups[rank], 0, "", "all_reduce")))
        else:
            dump = calls.waits("barrier").dump()
        dumps.append(dump)
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.DIFFERENT_GROUPS, (3,))


def test_one_name_for_other_members() -> None:
    dumps = [Rank(rank).call("barrier").waits("all_reduce").dump() for rank in range(3)]
    progress = GroupProgress("g", (0, 1), 0), GroupProgress("g", (1, 2), 0), GroupProgress("g", (0, 1), 0)
    dumps = [replace(dump, groups=(*dump.groups, one)) for dump, one in zip(dumps, progress, strict=True)]
    assert (_judge(*dumps).kind, _judge(*dumps).ranks) == (Kind.DIFFERENT_GROUPS, (1,))


def test_a_device_that_has_not_begun() -> None:
    dumps = [_waiting(rank) for rank in range(3)]
    for rank in range(3):
        last = dumps[rank].records[-1]._replace(device=DeviceTimes(None if rank == 2 else NOW_S - 20))
        dumps[rank] = replace(dumps[rank], records=(*dumps[rank].records[:-1], last))
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.NEVER_STARTED, (2,))


def test_the_root_of_a_reduce_alone_has_an_output() -> None:
    def dump(rank: int) -> Dump:
        calls = Rank(rank).call("reduce", peer=0, state=State.COMPLETED)
        site = calls.records[-1].site
        if rank:
            calls.records[-1] = calls.records[-1]._replace(site=replace(site, output_shapes=()))
        return calls.dump(at=20)

    assert _judge(*map(dump, range(3))).kind is Kind.NOTHING_WRONG


def test_what_a_call_was_for_is_said() -> None:
    dumps = [_waiting(rank) for rank in (0, 2)]
    last = dumps[0].records[-1]._replace(action="stage 2 microbatch 5 F", module="layers.3")
    dumps[0] = replace(dumps[0], records=(*dumps[0].records[:-1], last))
    verdict = _judge(dumps[0], _absent("running"))
    assert "for stage 2 microbatch 5 F layers.3" in verdict.summary


def test_one_of_a_thousand_ranks() -> None:
    def dump(rank: int) -> Dump:
        calls = Rank(rank, 1000).call("all_reduce")
        return calls.dump(at=33) if rank == 777 else calls.waits("all_reduce", 11).dump()

    verdict = _judge(*map(dump, range(1000)))
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (777,))
    assert "where ranks 0-776, 778-999 waited" in verdict.summary


@pytest.fixture
def quiet_pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    os.close(ends[0])


def test_what_threads_are_at(quiet_pipe: tuple[int, int]) -> None:
    reading, writing = quiet_pipe
    lock, has_begun, is_over = threading.Lock(), threading.Barrier(5), threading.Event()
    client, server = socket.socketpair()
    lock.acquire()

    def reads() -> None:
        has_begun.wait()
        os.read(reading, 1)

    def receives() -> None:
        has_begun.wait()
        client.recv(1)

    def locks() -> None:
        has_begun.wait()
        with lock:
            return

    def computes() -> None:
        has_begun.wait()
        while not is_over.is_set():
            pass

    threads = [threading.Thread(target=run) for run in (reads, receives, locks, computes)]
    for thread in threads:
        thread.start()
    has_begun.wait()
    try:
        for _ in range(100):  # a thread that has been let go may not have come to its call yet
            found = [activities().get(thread.ident or 0, "").partition(":")[0] for thread in threads]
            if found == ["read of pipe", "recvfrom of socket", "futex", "running"]:
                break
    finally:
        is_over.set()
        lock.release()
        os.close(writing)
        server.close()
        for thread in threads:
            thread.join()
        client.close()
    assert found == ["read of pipe", "recvfrom of socket", "futex", "running"]


def _steps(rank: int, num_ranks: int = 16) -> tuple[Rank, tuple[int, ...], tuple[int, ...]]:
    """A rank of a mesh of 4 columns after some steps, with its row and its column."""
    row, column = tuple(range(rank - rank % 4, rank - rank % 4 + 4)), tuple(range(rank % 4, num_ranks, 4))
    calls = Rank(rank, num_ranks)
    for _ in range(3):
        calls.call("all_gather_into_tensor", 11, row).call("reduce_scatter_tensor", 12, column)
    return calls, row, column


@pytest.mark.parametrize(("in_world", "to_blame"), [(range(4, 8), range(4, 8)), (range(8), range(16))])
def test_ranks_that_are_in_another_group_than_those_along_an_axis(in_world: range, to_blame: range) -> None:
    """A node goes on to a collective of all without the axis; or half of the ranks has had less data."""
    dumps = []
    for rank in range(16):
        calls, _, column = _steps(rank)
        waits = calls.waits("barrier", 20) if rank in in_world else calls.waits("reduce_scatter_tensor", 12, column)
        dumps.append(waits.dump())
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.WRONG_ORDER, tuple(to_blame))
    assert "in barrier #1 of group world at /job/train.py:20 in step" in verdict.summary
    assert "and those of 3 other groups at /job/train.py:12 in step" in verdict.summary


def test_a_rank_that_went_on_to_a_collective_has_left_its_message_out() -> None:
    """The next stage waits for it, and the one before, whose message nobody takes, for that stage."""
    dumps = [Rank(0, 4).waits("send", 11, peer=1), Rank(1, 4).waits("recv", 12, peer=2)]
    dumps += [Rank(rank, 4).waits("barrier", 30) for rank in (2, 3)]
    verdict = _judge(*(dump.dump() for dump in dumps))
    assert (verdict.kind, verdict.ranks) == (Kind.MISSING_SEND, (2,))
    assert verdict.summary.startswith("Rank 2 did not send what rank 1 waited to receive at /job/train.py:12 in step;")


def test_a_rank_that_left_out_a_send_and_a_receive() -> None:
    dumps = [Rank(0).waits("send", 11, peer=1), Rank(1).waits("barrier", 30), Rank(2).waits("recv", 12, peer=1)]
    verdict = _judge(*(dump.dump() for dump in dumps))
    assert (verdict.kind, verdict.ranks) == (Kind.MISSING_RECEIVE, (1,))
    assert "did not receive what rank 0 waited to send" in verdict.summary
    assert "rank 1 did not send what rank 2 waited to receive" in verdict.summary


def test_a_node_that_is_missing_along_an_axis_is_missing_in_several_groups() -> None:
    dumps = []
    for rank in range(16):
        calls, _, column = _steps(rank)
        dumps.append(calls.dump(at=55) if rank // 4 == 2 else calls.waits("reduce_scatter_tensor", 12, column).dump())
    verdict = _judge(*dumps)
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (8, 9, 10, 11))
    assert "(float32[4]) and those of 3 other groups, where ranks 0-7, 12-15 waited" in verdict.summary


def test_ranks_that_raised_the_same_with_words_of_their_own_share_a_verdict() -> None:
    dumps = [_waiting(0)]
    for rank in (1, 2):
        failure = Failure("ValueError", f"batch {rank} has no tokens", (line(7),))
        dumps.append(Rank(rank).call("barrier").dump(at=33, failure=failure))
    verdicts = judge(match(dumps))
    assert [(verdict.kind, verdict.ranks, verdict.cause) for verdict in verdicts] == [
        (Kind.RANK_ABSENT, (1, 2), Cause.RAISED)
    ]
    assert "rank 1 ended with ValueError (batch 1 has no tokens)" in verdicts[0].summary
    assert verdicts[0].summary.endswith("and the others there with words of their own.")


def test_who_left_is_named_before_who_raised_for_that() -> None:
    """As where one calls `sys.exit` before the first collective, which the other then refuses."""
    left = _absent(reason="exit")
    gone = "all_reduce: not every rank came, nor can: rank 1 has left the job before the first collective."
    victim = replace(Rank(0).call("barrier").dump(at=33), failure=Failure("CollectiveMismatchError", gone, (line(3),)))
    verdict = _judge(victim, left)
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (1,), Cause.ENDED)
    said = "Rank 1 ended early: its script has come to its end; rank 0 ended with CollectiveMismatchError ("
    assert verdict.summary.startswith(said)
    alone = _judge(replace(victim, world_size=1))
    assert alone.ranks == (0,)
