"""Steps that are recorded once and replayed, as the flight recorder tells them: on a device that tests move by hand."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import disttrain
from disttrain.errors import CollectiveTimeoutError
from disttrain.flight_recorder import FlightRecorder, analyze, read_dump
from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.flight_recorder.dumps.dump import Dump, dump_name, encode, packed, write_dump
from disttrain.flight_recorder.dumps.expanding import expanded
from disttrain.flight_recorder.dumps.reading.reader import decode
from disttrain.flight_recorder.dumps.rings.reader import decode_ring
from disttrain.flight_recorder.dumps.rings.replays import not_come
from disttrain.flight_recorder.live.replay_limits import ReplayLimits, end_overdue
from disttrain.flight_recorder.live.watchdog import Watchdog
from disttrain.flight_recorder.record.listing import Listing
from disttrain.flight_recorder.record.recall import recall
from disttrain.flight_recorder.record.record import DeviceTimes
from disttrain.flight_recorder.record.ring import descriptions as descriptions_module
from disttrain.flight_recorder.record.ring import ring as ring_module
from disttrain.process_group import ProcessGroup, World, entered_world
from disttrain.process_group.watching.replaying import listed_operations
from disttrain.store import HashStore


class HandMoved:
    """Marks within a graph: the device comes to operations, in replays, as a test says."""

    def __init__(self) -> None:
        self.marked: list[int] = []
        self.ended = 0
        self.came: dict[int, int] = {}

    def begin_graph(self) -> None:
        assert not self.marked

    def comes(self, index: int) -> bool:
        self.marked.append(index)
        return True

    def end_graph(self) -> None:
        assert self.ended == 0

    def read(self) -> list[int]:
        return [self.ended, *(self.came.get(index, 0) for index in range(8))]

    def go(self, replay: int, num_calls: int, *, ends: bool = False) -> None:
        """Come to so many operations of a replay; before that, to the end of all earlier ones."""
        self.came = {index: replay - (index >= num_calls) for index in range(8)}
        self.ended = replay if ends else replay - 1


class Rank:
    """A rank of a world of two, with a recorder, and steps that it records and replays."""

    def __init__(self, rank: int = 0, world_size: int = 2, num_records: int = 64) -> None:
        self.world = World(HashStore(), rank, world_size, backend="fake", timeout_s=60.0, device=torch.device("cpu"))
        self.recorder = FlightRecorder(num_records)
        self.kept: list[Listing] = []
        self.recorder.attach(self.world)
        self.whole = self.world.default_group
        pair = self.world.new_group([0, 1])
        assert isinstance(pair, ProcessGroup)
        self.pair = pair

    @contextmanager
    def recording(self, device: HandMoved | None = None) -> Iterator[Listing]:
        with self.recorder.listing(device, lambda tensors, group: True) as listing:
            listing.begin_graph()
            yield listing
            listing.end_graph()

    def recorded(self, device: HandMoved | None = None, size: int = 4, num_calls: int = 2) -> Listing:
        """A step with reductions in the world, and one among the pair before the last of them."""
        with self.recording(device) as listing:
            for index in range(num_calls):
                self.world.module = f"blocks.{index}"
                if index == num_calls - 1:
                    disttrain.all_gather_into_tensor(torch.empty(2 * size), torch.ones(size), group=self.pair)
                disttrain.all_reduce(torch.ones(size), group=self.whole)
            self.world.module = ""
        self.kept.append(listing)
        return listing

    def call(self) -> None:
        disttrain.all_reduce(torch.ones(3), group=self.whole)

    def dump(self, on_device: DeviceTimes | None = None, *, is_busy: bool | None = None) -> Dump:
        """A dump, in which the device has got through all replays but the last, where it is as `on_device` says."""
        dump = self.recorder.snapshot("asked for", device_is_busy=is_busy)
        if on_device is None:
            return dump
        now_s = dump.dumped_s
        past = DeviceTimes(now_s - 90.0, now_s - 89.0)
        replays = [
            each._replace(device=past, enqueued_s=now_s - 95.0, completed_s=now_s - 95.0) for each in dump.replays
        ]
        replays[-1] = replays[-1]._replace(device=on_device, enqueued_s=now_s - 60.0, completed_s=now_s - 60.0)
        return replace(dump, replays=tuple(replays))


def play(listing: Listing, num_times: int = 1) -> None:
    for _ in range(num_times):
        listing.begin(is_first=not listing.num_replays)
        listing.end()


def told(dump: Dump) -> list[tuple[str, str, int, str, str]]:
    return [
        (record.site.operation, record.site.group_name, record.sequence, record.module, record.replay)
        for record in expanded(dump).records
    ]


def test_a_replay_is_one_record_and_names_its_operations() -> None:
    rank = Rank()
    rank.call()
    listing = rank.recorded()
    assert told(rank.dump()) == [("all_reduce", "world", 1, "", "")]
    play(listing, 2)
    rank.call()
    dump = rank.dump()
    pair = rank.pair.group_name
    assert len(dump.records) == 2
    assert [(each.number, each.before) for each in dump.replays] == [(1, (1, 0)), (2, (3, 1))]
    assert told(dump) == [
        ("all_reduce", "world", 1, "", ""),
        ("all_reduce", "world", 2, "blocks.0", "replay 1 of step graph 1"),
        ("all_gather_into_tensor", pair, 1, "blocks.1", "replay 1 of step graph 1"),
        ("all_reduce", "world", 3, "blocks.1", "replay 1 of step graph 1"),
        ("all_reduce", "world", 4, "blocks.0", "replay 2 of step graph 1"),
        ("all_gather_into_tensor", pair, 2, "blocks.1", "replay 2 of step graph 1"),
        ("all_reduce", "world", 5, "blocks.1", "replay 2 of step graph 1"),
        ("all_reduce", "world", 6, "", ""),
    ]
    assert all(record.site.stack[0].file == __file__ for record in expanded(dump).records)
    assert {group.group_name: group.last_sequence for group in dump.groups} == {"world": 6, pair: 2}
    assert rank.world.default_group.come_to == (6, "all_reduce")


def test_messages_are_counted_by_their_channels() -> None:
    rank = Rank()
    with rank.recording() as listing:
        for _ in range(2):
            disttrain.send(torch.ones(2), dst=1, group=rank.whole)
            disttrain.recv(torch.ones(2), src=1, group=rank.whole)
    play(listing, 3)
    disttrain.send(torch.ones(2), dst=1, group=rank.whole)
    dump = rank.dump()
    assert [(entry[0], entry[2]) for entry in told(dump)] == [
        *((operation, number) for number in range(1, 7) for operation in ("send", "recv")),
        ("send", 7),
    ]
    assert {channel.operation: channel.last_sequence for channel in dump.channels} == {"send": 7, "recv": 6}


def test_a_dump_says_the_list_once(tmp_path: Path) -> None:
    rank = Rank()
    device = HandMoved()
    play(rank.recorded(device), 9)
    device.go(9, 1)
    dump = rank.dump(DeviceTimes(1.0))
    file = tmp_path / dump_name(dump)
    write_dump(file, dump)
    assert read_dump(file) == dump
    assert dump.replays[-1].not_come == (1, 2)
    assert dump.replays[-2].not_come == ()
    few = file.stat().st_size
    play(rank.recorder.listings[0], 20)
    write_dump(file, rank.dump())
    assert file.stat().st_size - few < 20 * 60


def test_calls_beside_replays_are_read_in_columns() -> None:
    rank = Rank()
    play(rank.recorded(), 2)
    for _ in range(40):
        rank.call()
    dump = rank.dump()
    assert decode(encode(dump)) == dump


@pytest.mark.parametrize(
    "item",
    [
        ["graph", 1, [[0, 0]]],
        ["graph", 1, [[99, 0, 0]]],
        ["graph", "1", []],
        ["replay", 0, 1, [0], 1.0, 1.0, None, None],
        ["replay", 1, 1, [0, 0], 1.0, 1.0, None, None],
        ["replay", 0, 1, [0, 0], None, 1.0, None, None],
        ["replay", 0, 1, [0, 0], 1.0, 1.0, [1.0], None],
        ["replay", 0, 1, [0, 0], 1.0, 1.0, None, ["all"]],
    ],
    ids=str,
)
def test_a_dump_with_a_replay_that_cannot_be_says_so(item: list[object]) -> None:
    rank = Rank()
    play(rank.recorded(), 2)
    body = encode(rank.dump())[: -len(packed(["end", 0xFFFFFFFF]))]
    whole = body + packed(item)
    dump = decode(whole + packed(["end", zlib.crc32(whole)]))
    assert dump.problems
    assert [each.number for each in dump.replays] == [1, 2]


def test_the_ring_says_it_too() -> None:
    """Of a process that was killed: without its device."""
    rank = Rank(num_records=4)
    play(rank.recorded(), 3)
    dump, _ = decode_ring(rank.recorder.content())
    # Of each replay there are two slots, one for each group: of the first one they are lost.
    assert [each.number for each in dump.replays] == [2, 3]
    assert {each.not_come for each in dump.replays} == {None}
    assert [record.device for record in expanded(dump).records] == [None] * 6


def test_operations_without_a_mark_are_passed_with_the_next_that_has_one() -> None:
    assert not_come([4, 5, -1, 5, -1], 5, 4) == (3,)
    assert not_come([4, 5, -1, 4, -1], 5, 4) == (1, 2, 3)
    assert not_come([5, 5, -1, 5, -1], 5, 4) == ()
    assert not_come([3, 4, -1, 4, -1], 5, 4) == (0, 1, 2, 3)
    assert not_come([4], 5, 2) == (0, 1)


def test_a_hang_within_a_replay_is_named(tmp_path: Path) -> None:
    """Rank 1 has not launched the fourth replay, and rank 0 is in its first operation."""
    first, second = Rank(0), Rank(1)
    device, other = HandMoved(), HandMoved()
    play(first.recorded(device), 4)
    play(second.recorded(other), 3)
    device.go(4, 1)
    other.go(3, 3, ends=True)
    now_s = first.dump().dumped_s
    dumps = [
        first.dump(DeviceTimes(now_s - 50.0), is_busy=True),
        second.dump(DeviceTimes(now_s - 60.0, now_s - 60.0)),
    ]
    for dump in dumps:
        write_dump(tmp_path / dump_name(replace(dump, job="j")), replace(dump, job="j"))
    verdict = analyze(tmp_path).verdicts[0]
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    call = "all_reduce #7 of group world (float32[4]) for blocks.0 in replay 4 of step graph 1"
    assert verdict.summary.startswith(f"Rank 1 did not come to {call}, where rank 0 waited at {__file__}:")


def test_operations_that_all_have_entered_and_that_do_not_end() -> None:
    dumps = []
    for number in range(2):
        rank, device = Rank(number), HandMoved()
        play(rank.recorded(device), 4)
        device.go(4, 2)
        now_s = rank.dump().dumped_s
        dumps.append(rank.dump(DeviceTimes(now_s - 50.0), is_busy=True))
    verdict = judge(match([expanded(dump) for dump in dumps]))[0]
    assert verdict.kind is Kind.NETWORK
    assert "all_gather_into_tensor #4 of group" in verdict.summary
    assert "for blocks.1 in replay 4 of step graph 1" in verdict.summary


def test_ranks_that_replay_different_graphs_are_told_apart() -> None:
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        play(rank.recorded(), 2)
    play(ranks[0].recorded(size=8))
    play(ranks[1].recorded(size=16))
    verdict = judge(match([expanded(rank.dump()) for rank in ranks]))[0]
    assert verdict.kind is Kind.MISMATCHED_SIZES
    assert "#5 of group world" in verdict.summary


def test_what_a_listing_refers_to_stays_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptions_module, "MAX_SITES", 16)
    monkeypatch.setattr(ring_module, "MAX_ENTRIES_BYTES", 4096)
    rank = Rank(num_records=4)
    listing = rank.recorded()
    for size in range(1, 200):
        disttrain.all_reduce(torch.ones(size), group=rank.whole)
    play(listing)
    assert [entry[3] for entry in told(rank.dump()) if entry[4]] == ["blocks.0", "blocks.1", "blocks.1"]
    del listing
    rank.kept.clear()
    for size in range(1, 200):
        disttrain.all_reduce(torch.ones(size), group=rank.whole)
    assert b"blocks.0" not in rank.recorder.content()


def test_others_ask_for_a_call_of_a_replay() -> None:
    rank = Rank()
    play(rank.recorded(), 3)
    said = recall(rank.recorder, "world", 5)
    assert said is not None
    assert said["fields"]["operation"] == "all_reduce"
    assert "for blocks.0 at " in said["text"]


def test_what_is_not_of_the_graph_is_recorded_as_ever() -> None:
    rank = Rank()
    with rank.recorder.listing(None, lambda tensors, group: tensors[0].numel() > 2):
        disttrain.all_reduce(torch.ones(2), group=rank.whole)
        work = disttrain.all_reduce(torch.ones(3), group=rank.whole, async_op=True)
        assert work is not None
        work.wait()
    assert [(entry[0], entry[2]) for entry in told(rank.dump())] == [("all_reduce", 1)]


def test_a_group_that_has_ended_is_an_obstacle() -> None:
    rank = Rank()
    listing = rank.recorded()
    assert listing.obstacle() == ""
    rank.pair.end("rank 1 has left the job")
    assert listing.obstacle() == f"group {rank.pair.group_name} has ended: rank 1 has left the job"


def test_without_a_recorder_nobody_is_told() -> None:
    with listed_operations() as untold:
        untold.begin_graph()
        untold.end_graph()
    untold.begin(is_first=True)
    untold.end()
    assert untold.obstacle() == ""
    rank = Rank()
    with entered_world(rank.world), listed_operations() as listing:
        pass
    assert isinstance(listing, Listing)


def test_a_replay_that_does_not_end_in_time_ends_its_group(caplog: pytest.LogCaptureFixture) -> None:
    rank, device = Rank(), HandMoved()
    listing = rank.recorded(device)
    limits = ReplayLimits()
    play(listing, 3)
    device.go(2, 2)
    assert limits.look([listing], 0.0) == []
    assert limits.look([listing], 59.0) == []
    device.go(2, 3)
    assert limits.look([listing], 60.0) == []
    assert limits.look([listing], 119.0) == []
    ((found, within),) = limits.look([listing], 120.0)
    assert found is listing
    assert (within.call.operation, within.call.sequence, within.call.module) == ("all_reduce", 4, "blocks.1")
    assert limits.look([listing], 121.0) == []
    end_overdue(listing, within)
    for thread in threading.enumerate():
        if thread.name == "disttrain flight replay limit":
            thread.join(60.0)
    with pytest.raises(
        CollectiveTimeoutError,
        match=r"all_reduce: not every rank came within 60 s \(in replay 2 of step graph 1\)"
        r".* \[rank 0, group world, ranks 0,1, sequence 4, blocks\.1\]",
    ):
        listing.begin()
    assert "in replay 2 of step graph 1" in rank.whole.ended_by
    assert "in replay 2 of step graph 1" in caplog.text
    assert limits.look([listing], 500.0) == []


def test_the_watchdog_watches_replays(tmp_path: Path) -> None:
    rank, device = Rank(), HandMoved()
    rank.whole.set_timeout(0.3)
    listing = rank.recorded(device)
    play(listing)
    device.go(1, 1)
    # Of one rank, which asks no others.
    rank.world.world_size = 1
    watchdog = Watchdog(rank.recorder, tmp_path, tmp_path, 0.4, ends_job=False)
    try:
        end_s = time.monotonic() + 60.0
        while listing.failure is None and time.monotonic() < end_s:
            time.sleep(0.02)
    finally:
        watchdog.close()
    assert "in replay 1 of step graph 1" in str(listing.failure)
    (file,) = tmp_path.glob("*.flight")
    assert read_dump(file).reason == "a replay of rank 0 has not ended in time"


def test_a_replay_that_has_ended_or_is_before_its_operations_is_not_overdue() -> None:
    """Before the first it waits for no rank; behind the last, nothing is launched."""
    rank, device = Rank(), HandMoved()
    listing = rank.recorded(device)
    limits = ReplayLimits()
    play(listing, 3)
    for now_s, num_calls, ends in ((0.0, 0, False), (100.0, 0, False), (200.0, 3, True), (300.0, 3, True)):
        device.go(3, num_calls, ends=ends)
        assert limits.look([listing], now_s) == []
