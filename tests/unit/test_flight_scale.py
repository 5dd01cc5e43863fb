"""The work of the analyzer grows with the ranks, and with nothing faster: it is counted for worlds of two sizes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

import disttrain
from disttrain.flight_recorder import FlightRecorder
from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.flight_recorder.analysis.waiting.wait_graph import fronts_of
from disttrain.flight_recorder.analysis.waiting.waits import find_waits
from disttrain.flight_recorder.dumps.dump import Dump, encode
from disttrain.flight_recorder.dumps.reading.reader import decode
from disttrain.flight_recorder.dumps.reading.record_runs import HEAD, NewestFirst
from disttrain.flight_recorder.dumps.reading.shared_values import Shared
from disttrain.flight_recorder.dumps.rings.reader import decode_ring
from disttrain.flight_recorder.record.columns import Records
from disttrain.flight_recorder.record.record import CallSite, DeviceTimes, Failure, Record
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore
from tests.unit.flight_ranks import Rank, line

SMALL, LARGE = 24, 96
NUM_CALLS = 30


def _before(rank: int, num_ranks: int, num_calls: int = NUM_CALLS) -> Rank:
    calls = Rank(rank, num_ranks)
    for number in range(num_calls):
        calls.call("all_reduce", at=number % 5)
    return calls


def _one_absent(rank: int, num_ranks: int) -> Dump:
    calls = _before(rank, num_ranks)
    return calls.dump(at=33) if rank == 1 else calls.waits("all_reduce").dump()


def _half_absent(rank: int, num_ranks: int) -> Dump:
    calls = _before(rank, num_ranks)
    return calls.dump(at=33) if rank % 2 else calls.waits("all_reduce").dump()


def _half_raised(rank: int, num_ranks: int) -> Dump:
    """Each with words of its own."""
    calls = _before(rank, num_ranks)
    if rank % 2:
        return calls.dump(at=33, failure=Failure("ValueError", f"batch {rank} has no tokens", (line(7),)))
    return calls.waits("all_reduce").dump()


def _another_operation(rank: int, num_ranks: int) -> Dump:
    return _before(rank, num_ranks).waits("barrier" if rank == 1 else "all_reduce", at=40).dump()


def _two_groups(rank: int, num_ranks: int) -> Dump:
    everybody = tuple(range(num_ranks))
    return _before(rank, num_ranks).waits("all_reduce", at=rank % 2, group=everybody[rank % 2 :]).dump()


def _sends_in_a_ring(rank: int, num_ranks: int) -> Dump:
    return _before(rank, num_ranks).waits("send", peer=(rank + 1) % num_ranks).dump()


def _not_at_the_first_call(rank: int, num_ranks: int) -> Dump:
    calls = _before(rank, num_ranks)
    if rank % 2:
        return calls.waits("barrier").dump()
    dump = calls.dump(at=33)
    late = replace(dump.groups[0], group_name="late", last_sequence=0, connecting="all_reduce")
    return replace(dump, groups=(*dump.groups, late))


def _devices(rank: int, num_ranks: int) -> Dump:
    calls = _before(rank, num_ranks)
    dump = calls.dump(at=33) if rank % 2 else calls.call("all_reduce").dump(at=33)
    marked = [each._replace(device=DeviceTimes(each.enqueued_s, each.completed_s)) for each in dump.records]
    if rank % 2 == 0:
        marked[-1] = marked[-1]._replace(device=DeviceTimes(marked[-1].enqueued_s))
    return replace(dump, records=tuple(marked), device_is_busy=True)


def _queued(rank: int, num_ranks: int) -> Dump:
    """Without marks: hosts have left what their devices cannot have."""
    calls = _before(rank, num_ranks)
    dump = calls.dump(at=33) if rank % 2 else calls.call("all_reduce").dump(at=33)
    return replace(dump, device_is_busy=True)


def _pending(rank: int, num_ranks: int, num_calls: int = NUM_CALLS, received: int = 4) -> Dump:
    """Nobody has waited for anything, and one rank stays away after a few calls."""
    calls = Rank(rank, num_ranks)
    call = calls.call if rank == 1 else calls.waits
    for number in range(4 if rank == 1 else num_calls):
        call("all_reduce", at=number % 5)
        call("send", peer=(rank + 1) % num_ranks)
        call("recv", shape=(received,), peer=(rank - 1) % num_ranks)
    return calls.dump(at=33) if rank == 1 else calls.dump()


def _other_messages(rank: int, num_ranks: int) -> Dump:
    return _pending(rank, num_ranks, received=5)


def _absent_in_pairs(rank: int, num_ranks: int) -> Dump:
    """Each other one waits for its neighbour, which is at a line of its own."""
    calls, first = _before(rank, num_ranks), rank - rank % 2
    return calls.dump(at=100 + rank) if rank % 2 else calls.waits("all_reduce", group=(first, first + 1)).dump()


def _node_in_another_order(rank: int, num_ranks: int) -> Dump:
    """Four ranks are in a collective of all, the others still along their axis."""
    calls = _before(rank, num_ranks)
    if 4 <= rank < 8:
        return calls.waits("all_reduce", at=50).dump()
    return calls.waits("reduce_scatter_tensor", at=60, group=tuple(range(rank % 4, num_ranks, 4))).dump()


def _well(rank: int, num_ranks: int) -> Dump:
    return _before(rank, num_ranks).dump(at=20, reason="exit")


CASES = {
    "one absent": (_one_absent, Kind.RANK_ABSENT),
    "half absent": (_half_absent, Kind.RANK_ABSENT),
    "half raised": (_half_raised, Kind.RANK_ABSENT),
    "another operation": (_another_operation, Kind.MISMATCHED_OPERATION),
    "two groups": (_two_groups, Kind.WRONG_ORDER),
    "sends in a ring": (_sends_in_a_ring, Kind.CROSSED_SENDS),
    "not at the first call": (_not_at_the_first_call, Kind.DIFFERENT_GROUPS),
    "devices": (_devices, Kind.RANK_ABSENT),
    "queued on devices": (_queued, Kind.RANK_ABSENT),
    "nothing waited for": (_pending, Kind.RANK_ABSENT),
    "other messages": (_other_messages, Kind.MISMATCHED_SIZES),
    "absent in pairs": (_absent_in_pairs, Kind.RANK_ABSENT),
    "a node in another order": (_node_in_another_order, Kind.WRONG_ORDER),
    "nothing": (_well, Kind.NOTHING_WRONG),
}


@contextmanager
def _counted_calls() -> Iterator[Callable[[], int]]:
    """Counts the calls of functions within the block."""
    num_calls = 0

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield lambda: num_calls
    finally:
        sys.setprofile(before)


def _read(make: Callable[[int, int], Dump], num_ranks: int) -> list[Dump]:
    """As if read from a folder, where all ranks share what they have in common."""
    shared = Shared()
    return [decode(encode(make(rank, num_ranks)), shared) for rank in range(num_ranks)]


@pytest.mark.parametrize(("make", "kind"), CASES.values(), ids=CASES)
def test_judging_takes_linear_work(make: Callable[[int, int], Dump], kind: Kind) -> None:
    num_calls = {}
    for num_ranks in (SMALL, LARGE):
        dumps = _read(make, num_ranks)
        with _counted_calls() as counted:
            verdicts = judge(match(dumps))
        num_calls[num_ranks] = counted()
        assert verdicts[0].kind is kind
    assert num_calls[LARGE] < 1.1 * LARGE / SMALL * num_calls[SMALL]


@pytest.mark.parametrize(("make", "kind"), CASES.values(), ids=CASES)
def test_the_graph_of_waits_has_linear_size(make: Callable[[int, int], Dump], kind: Kind) -> None:
    for num_ranks in (SMALL, LARGE):
        fronts = fronts_of(find_waits(match(_read(make, num_ranks))))
        assert sum(len(front.waits) + len(front.for_ranks) for front in fronts) <= 8 * num_ranks


def test_few_records_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hang, the records of the calls that do not end, whatever the rings hold."""
    made: list[int] = []
    make = Records._at

    def counting(self: Records, index: int) -> Record:
        made.append(index)
        return make(self, index)

    monkeypatch.setattr(Records, "_at", counting)
    for num_ranks, num_calls in ((SMALL, NUM_CALLS), (LARGE, 3 * NUM_CALLS)):
        shared, dumps = Shared(), []
        for rank in range(num_ranks):
            calls = _before(rank, num_ranks, num_calls)
            dumps.append(decode(encode(calls.dump(at=33) if rank % 2 else calls.waits("all_reduce").dump()), shared))
        made.clear()
        judge(match(dumps))
        assert len(made) <= 4 * num_ranks


def test_of_all_that_nobody_has_waited_for_the_ends_are_looked_at() -> None:
    found = []
    for num_calls in (NUM_CALLS, 3 * NUM_CALLS):
        dumps = [_pending(rank, SMALL, num_calls) for rank in range(SMALL)]
        found.append(find_waits(match(dumps)))
    assert len(found[0]) == len(found[1]) <= 6 * SMALL
    of_all = {wait.record.sequence for wait in found[1] if wait.record.site.operation == "all_reduce"}
    assert of_all == {1, 3 * NUM_CALLS}


def test_finding_waits_takes_hardly_more_work_the_more_is_under_way() -> None:
    num_counted = []
    for num_calls in (NUM_CALLS, 4 * NUM_CALLS):
        matched = match(_read(partial(_pending, num_calls=num_calls), SMALL))
        with _counted_calls() as counted:
            find_waits(matched)
        num_counted.append(counted())
    assert num_counted[1] < 1.5 * num_counted[0]


def test_who_waits_for_many_that_wait_is_not_listed_in_each_verdict() -> None:
    sizes = [
        sum(len(line) for verdict in judge(match(_read(_absent_in_pairs, num_ranks))) for line in verdict.evidence)
        for num_ranks in (2 * LARGE, 8 * LARGE)
    ]
    assert sizes[1] < 4.5 * sizes[0]


def test_messages_that_are_not_received_as_sent_are_told_once_for_each_channel() -> None:
    for num_calls in (NUM_CALLS, 3 * NUM_CALLS):
        dumps = [_pending(rank, SMALL, num_calls, received=5) for rank in range(SMALL)]
        kinds = [verdict.kind for verdict in judge(match(dumps))]
        assert kinds == [*[Kind.MISMATCHED_SIZES] * SMALL, Kind.RANK_ABSENT]


def test_ranks_that_did_the_same_share_their_columns() -> None:
    dumps = _read(_half_absent, LARGE)
    for name in ("sites", "site_numbers", "sequences", "label_numbers"):
        assert len({id(getattr(dump.records, name)) for dump in dumps}) == 2, name


def test_a_full_ring_is_read_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    num_singly: list[int] = []
    add = NewestFirst.add

    def counting(self: NewestFirst, columns: list[Any], states: bytes) -> None:
        num_singly.append(len(states))
        add(self, columns, states)

    monkeypatch.setattr(NewestFirst, "add", counting)
    counts = {}
    for num_calls in (1000, 2000):
        num_singly.clear()
        dump = _before(0, 4, num_calls).dump(at=33)
        assert decode(encode(dump)).records == dump.records
        counts[num_calls] = sum(num_singly)
    assert counts[2000] == counts[1000] < 50


def test_records_of_groups_with_different_counts_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers take different numbers of bytes, and no record is encoded as the one before."""
    num_singly: list[int] = []
    add = NewestFirst.add

    def counting(self: NewestFirst, columns: list[Any], states: bytes) -> None:
        num_singly.append(len(states))
        add(self, columns, states)

    monkeypatch.setattr(NewestFirst, "add", counting)
    for num_steps in (200, 400):
        num_singly.clear()
        calls = Rank(0, 8)
        for step in range(num_steps):
            for number in range(3):
                calls.call("all_reduce", at=number, group=(0, 1), age_s=30 - step / 100, took_s=number / 1000)
            calls.call("all_reduce", group=(0, 2, 4), age_s=30 - step / 100)
            if step % 7 == 0:
                calls.call("send", peer=3)
        records = [
            record._replace(sequence=record.sequence + 65_400) if record.site.group_name == "0-1" else record
            for record in calls.waits("all_reduce", group=(0, 1)).records
        ]
        dump = replace(calls.dump(), records=tuple(records))
        read = decode(encode(dump))
        assert read.problems == ()
        assert read == dump
        assert sum(num_singly) < 80


def test_records_of_one_length_that_are_encoded_otherwise_are_read_together() -> None:
    """Of some the number of the site takes one byte more, of others their own number."""
    draw = random.Random(0)
    calls = Rank(0, 8)
    for number in range(700):
        calls.call("all_reduce", at=draw.randrange(200), group=draw.choice([(0, 1), (0, 2)]), age_s=30 - number / 100)
    dump = calls.waits("all_reduce", group=(0, 1)).dump()
    data = encode(dump)
    runs = data.split(HEAD)[1:]
    assert len({(len(run), run[0] > 0x7F) for run in runs}) > len({len(run) for run in runs})
    read = decode(data)
    assert read.problems == ()
    assert read == dump


def test_ranks_that_called_the_same_are_looked_at_once_whatever_else_they_called() -> None:
    """In a mesh those of one group have each messages of their own."""
    for num_ranks in (4, 16):
        shared = Shared()
        dumps = []
        for rank in range(num_ranks):
            calls = Rank(rank, num_ranks)
            for _ in range(40):
                calls.call("all_reduce").call("send", 20, peer=(rank + 1) % num_ranks)
            dumps.append(decode(encode(calls.dump()), shared))
        ((_, collectives),) = match(dumps).collectives.items()
        assert len(collectives._kinds) == 1
        assert len([*collectives._called()]) == 1


def test_a_dump_is_written_without_going_through_all_ranks_for_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[CallSite] = []
    hash_of = CallSite.__hash__
    monkeypatch.setattr(CallSite, "__hash__", lambda site: hashed.append(site) or hash_of(site))
    counts = []
    for num_calls in (200, 800):
        dump = decode(encode(_before(0, LARGE, num_calls).dump(at=33)))
        hashed.clear()
        encode(dump)
        counts.append(len(hashed))
    assert counts[0] == counts[1] <= 4 * 5


def test_a_dump_that_is_cut_is_read_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    num_singly: list[int] = []
    add = NewestFirst.add

    def counting(self: NewestFirst, columns: list[Any], states: bytes) -> None:
        num_singly.append(len(states))
        add(self, columns, states)

    monkeypatch.setattr(NewestFirst, "add", counting)
    for num_calls in (1000, 2000):
        num_singly.clear()
        dump = _before(0, 4, num_calls).dump(at=33)
        data = encode(dump)
        after_head = data.rindex(HEAD, 0, len(data) - 1000) + len(HEAD)
        for size in (len(data) - 1, len(data) - 20_000, after_head):
            read = decode(data[:size])
            assert read.records == dump.records[num_calls - len(read.records) :]
            assert len(read.records) > num_calls / 2
            (problem,) = read.problems
            assert problem.startswith("is cut off after ")
        assert sum(num_singly) < 100


def test_rings_are_read_a_column_at_a_time_and_share_what_they_have_in_common() -> None:
    num_calls = {}
    for num_records in (100, 1000):
        recorder = FlightRecorder(num_records=num_records)
        world = World(HashStore(), 0, 64, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
        with entered_world(world):
            recorder.attach(world)
            for _ in range(num_records + 7):
                disttrain.all_reduce(torch.ones(2))
            content = recorder.content()
        shared = Shared()
        (first, _), _ = decode_ring(content, shared=shared), decode_ring(content, shared=shared)
        with _counted_calls() as counted:
            dump, _ = decode_ring(content, shared=shared)
        num_calls[num_records] = counted()
        assert [record.sequence for record in dump.records] == list(range(8, num_records + 8))
        assert dump.groups[0].ranks is first.groups[0].ranks
        for name in ("sites", "site_numbers", "sequences", "label_numbers"):
            assert getattr(dump.records, name) is getattr(first.records, name), name
    assert num_calls[1000] < num_calls[100] + 50
