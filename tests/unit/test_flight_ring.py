"""The ring file: what a process that was killed leaves, whatever state the file is in, and that nothing grows in it."""

from __future__ import annotations

import gzip
import os
import stat
import struct
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import disttrain
from disttrain.errors import FlightDumpError
from disttrain.flight_recorder import FlightRecorder, analyze
from disttrain.flight_recorder.dumps.rings.reader import decode_ring, parse_stacks, read_ring, ring_owner
from disttrain.flight_recorder.live.watchdog import Waiting
from disttrain.flight_recorder.record.process.process_state import start_of
from disttrain.flight_recorder.record.record import Frame, State
from disttrain.flight_recorder.record.ring import descriptions as descriptions_module
from disttrain.flight_recorder.record.ring import layout
from disttrain.flight_recorder.record.ring import ring as ring_module
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore

FILES = Path(__file__).parent / "flight_files"


def _fake_world(world_size: int = 4) -> World:
    return World(HashStore(), 0, world_size, backend="fake", timeout_s=1.0, device=torch.device("cpu"))


def _used(num_records: int = 8, folder: Path | None = None) -> FlightRecorder:
    """A recorder that has seen a bit of everything."""
    recorder = FlightRecorder(num_records=num_records, num_frames=2)
    with entered_world(_fake_world()) as world:
        recorder.attach(world, folder)
        world.action, world.module = "stage 1 microbatch 3 F", "layers.0"
        disttrain.all_reduce(torch.ones(2, 3))
        world.action, world.module = "", ""
        disttrain.send(torch.ones(5, dtype=torch.int32), dst=2)
        disttrain.send(torch.ones(5, dtype=torch.int32), dst=2)
        disttrain.all_gather_into_tensor(torch.empty(8), torch.ones(2), async_op=True)
        number = recorder.begin("barrier", world.default_group, 3, (), (), None)
        recorder.end(number, FlightDumpError("barrier", "the transport failed."))
        # As after a kill: the world is not destroyed, which would remove the file.
        world.recorder = None
    return recorder


def test_the_file_says_what_the_recorder_knows(tmp_path: Path) -> None:
    recorder = _used(folder=tmp_path)
    dump = recorder.snapshot("asked for")
    (file,) = tmp_path.iterdir()
    assert file.name == f"{recorder.name}.ring"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    owner = ring_owner(file)
    assert owner is not None
    assert (owner.pid, owner.start) == (os.getpid(), start_of(os.getpid()))
    left = read_ring(file)
    assert left == replace(dump, reason="ring", threads=(), dumped_s=left.dumped_s)
    assert [(r.site.operation, r.sequence, r.state) for r in left.records] == [
        ("all_reduce", 1, State.COMPLETED),
        ("send", 1, State.COMPLETED),
        ("send", 2, State.COMPLETED),
        ("all_gather_into_tensor", 2, State.ENQUEUED),
        ("barrier", 3, State.FAILED),
    ]
    assert (left.records[0].action, left.records[0].module) == ("stage 1 microbatch 3 F", "layers.0")
    assert left.records[1].action == ""
    assert left.records[-1].error == "barrier: the transport failed."
    assert left.records[1].site.input_shapes == ((5,),)
    assert left.records[0].site.stack[0].file == __file__
    assert [(g.group_name, g.ranks, g.last_sequence) for g in left.groups] == [("world", (0, 1, 2, 3), 3)]
    assert [(c.operation, c.peer_rank, c.last_sequence) for c in left.channels] == [("send", 2, 2)]
    assert left.dumped_s == left.records[-1].completed_s
    (analyzed,) = analyze(tmp_path).dumps
    assert analyzed == left
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_was_being_written_is_left_out() -> None:
    recorder = _used()
    ring = recorder.ring
    last = ring.first_word + layout.SLOT_WORDS * 4
    assert ring.words[last] == 4
    ring.words[last] = 12
    dump, _ = decode_ring(ring.content())
    assert [record.sequence for record in dump.records] == [1, 1, 2, 2]
    assert dump.problems == ("has 1 records that were being written",)


def test_a_cut_anywhere_gives_an_answer() -> None:
    content = _used(num_records=4).ring.content()
    whole, _ = decode_ring(content)
    known = {record._replace(error=None) for record in whole.records}
    head_size = layout.entries_at(4, ring_module.NUM_COUNTERS)
    header_size = layout.ENTRY.size + layout.ENTRY.unpack_from(content, head_size)[0]
    for size in (*range(layout.COUNTERS_AT), head_size - 1):
        with pytest.raises(FlightDumpError):
            decode_ring(content[:size])
    for size in range(head_size, len(content)):
        try:
            dump, _ = decode_ring(content[:size])
        except FlightDumpError:
            assert size < head_size + header_size
            continue
        # The text of an error comes last, and is missed by nobody.
        assert {record._replace(error=None) for record in dump.records} <= known
        assert dump.problems or len(dump.records) == len(known)


@settings(max_examples=60)
@given(damage=st.lists(st.tuples(st.integers(0), st.integers(0, 7)), min_size=1, max_size=8))
def test_flipped_bits_give_an_answer(damage: list[tuple[int, int]]) -> None:
    content = bytearray(_CONTENT)
    head = layout.COUNTERS_AT
    places = [*range(head), *range(layout.slots_at(ring_module.NUM_COUNTERS), len(content))]
    for place, bit in damage:
        content[places[place % len(places)]] ^= 1 << bit
    try:
        dump, _ = decode_ring(bytes(content))
    except FlightDumpError:
        return
    assert len(dump.records) <= 4


def test_what_is_described_stays_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ring_module, "MAX_ENTRIES_BYTES", 20_000)
    monkeypatch.setattr(descriptions_module, "MAX_SITES", 50)
    recorder = FlightRecorder(num_records=16)
    with entered_world(_fake_world()) as world:
        recorder.attach(world, tmp_path)
        (file,) = tmp_path.iterdir()
        empty_size = file.stat().st_size
        for length in range(1, 600):
            world.action = f"microbatch {length}"
            disttrain.all_reduce(torch.ones(length))
            assert file.stat().st_size < empty_size + 60_000
            if length % 37 == 0:
                left = read_ring(file)
                shapes = [((length,),) for length in range(max(length - 15, 1), length + 1)]
                assert [record.site.input_shapes for record in left.records] == shapes
                assert left.problems == ()
        for length in range(200):
            # Descriptions come and go; the records that were there stay described.
            recorder._new_label(f"never used {length}", "")
        left = read_ring(file)
    assert [record.site.input_shapes for record in left.records] == [((length,),) for length in range(584, 600)]
    assert [record.action for record in left.records] == [f"microbatch {length}" for length in range(584, 600)]
    assert left.groups[0].last_sequence == 599
    assert left.problems == ()


def test_callers_of_one_line_are_told_apart() -> None:
    recorder = FlightRecorder()

    def common() -> None:
        disttrain.barrier()

    def first() -> None:
        common()

    def second() -> None:
        common()

    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        first()
        second()
        records = recorder.snapshot("asked for").records
    assert [record.site.stack[1].function.rpartition(".")[2] for record in records] == ["first", "second"]


@pytest.mark.parametrize("depth", range(7))
def test_callers_are_told_apart_in_a_loop(depth: int) -> None:
    """However often one of them has called, and however far it is from the call; the same for other lines of one."""
    recorder = FlightRecorder()

    def below(num_frames: int) -> None:
        if num_frames:
            below(num_frames - 1)
        else:
            disttrain.barrier()

    def first(is_other: bool) -> None:
        below(depth - 1) if depth else disttrain.barrier()

    def second(is_other: bool) -> None:
        below(depth - 1) if depth else disttrain.barrier()

    def third(is_other: bool) -> None:
        if is_other:
            below(depth - 1) if depth else disttrain.barrier()
        else:
            below(depth - 1) if depth else disttrain.barrier()

    names = [*["first"] * 5, "second", "first", *["third"] * 3, "other", "third", *["first", "second", "other"] * 2]
    functions = {"first": first, "second": second, "third": third, "other": third}
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        for name in names:
            functions[name](name == "other")
        records = recorder.snapshot("asked for").records
    frames = [record.site.stack[depth] for record in records]
    start = third.__code__.co_firstlineno
    found = ["other" if frame.line == start + 2 else frame.function.rpartition(".")[2] for frame in frames]
    assert found == names


def test_a_loop_whose_calls_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come again as they came before, and are described anew."""
    monkeypatch.setattr(descriptions_module, "MAX_SITES", 5)
    monkeypatch.setattr(descriptions_module, "_NUM_UNDER_WAY", 3)
    recorder = FlightRecorder(num_records=2)
    part = torch.ones(4)
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        for step in range(6):
            disttrain.broadcast(part, 0)
            last = recorder.snapshot("asked for").records[-1]
            assert (last.site.operation, last.site.tensors) == ("broadcast", "float32[4]")
            disttrain.all_reduce(part)
            disttrain.barrier()
            disttrain.barrier()
            for number in range(8 if step == 3 else 0):
                recorder._new_label(f"never used {number}", "")
        dump = recorder.snapshot("asked for")
    assert [record.site.operation for record in dump.records] == ["barrier"] * 2
    assert dump.problems == ()


def test_threads_that_call_in_turns() -> None:
    """Each record has the lines of its own thread, whatever the others have called before."""
    recorder = FlightRecorder()
    with entered_world(_fake_world()) as world:
        recorder.attach(world)

        def alone(length: int) -> None:
            tensor = torch.ones(length)
            for _ in range(200):
                disttrain.all_reduce(tensor, group=world.default_group)

        threads = [threading.Thread(target=alone, args=(length,)) for length in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dump = recorder.snapshot("asked for")
    shapes = Counter(record.site.input_shapes for record in dump.records)
    assert shapes == {((length,),): 200 for length in (1, 2, 3)}
    assert {record.site.stack[0].function.rpartition(".")[2] for record in dump.records} == {"alone"}
    assert len({record.site for record in dump.records}) == 3


def test_groups_that_are_destroyed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records still name the last of them; their counters are used again."""
    monkeypatch.setattr(ring_module, "NUM_COUNTERS", 64)
    recorder = FlightRecorder(num_records=4)
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        disttrain.barrier()
        for number in range(100):
            group = disttrain.new_group([0, 1])
            for _ in range(number % 7 + 1):
                disttrain.all_reduce(torch.ones(4), group=group)
            world.destroy_group(group)
        dump = recorder.snapshot("asked for")
        assert len(decode_ring(recorder.content())[0].groups) < 64
    last = dump.records[-1]
    progress = {group.group_name: group.last_sequence for group in dump.groups}
    assert (last.sequence, progress[last.site.group_name], progress["world"]) == (99 % 7 + 1, 99 % 7 + 1, 1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a ring"),
        (layout.MAGIC, "is cut off in its head"),
        (layout.MAGIC + struct.pack("@IIIIQQ", 5, 4, 4, 320, 1, 0), "has format version 5"),
        (layout.MAGIC + struct.pack("@IIIIQQ", 1, 4, 4, 288, 1 << 56, 0), "is of a machine with another byte order"),
        (layout.MAGIC + struct.pack("@IIIIQQ", 1, 1 << 31, 4, 288, 1, 0), "is cut off in its head, or damaged"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_name(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.ring").write_bytes(content)
    with pytest.raises(FlightDumpError, match=f"^read_ring: a.ring {problem}"):
        read_ring(tmp_path / "a.ring")


def test_a_ring_of_the_first_version_is_read() -> None:
    dump, _ = decode_ring(gzip.decompress((FILES / "version-1.ring.gz").read_bytes()))
    assert dump.problems == ()
    assert [(r.site.operation, r.sequence, r.state.value, r.action) for r in dump.records] == [
        ("all_reduce", 1, "completed", "stage 1 microbatch 3 F"),
        ("send", 1, "completed", ""),
        ("send", 2, "completed", ""),
        ("all_gather_into_tensor", 2, "enqueued", ""),
        ("barrier", 3, "failed", ""),
    ]
    assert dump.records[0].site.stack == (Frame("/job/train.py", 10, "step"), Frame("/job/train.py", 11, "step"))


def test_a_ring_of_the_second_version_is_read() -> None:
    """Its slots tell in their flags, in microseconds, when the host began to wait."""
    recorder = FlightRecorder(num_records=4)
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        work = disttrain.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        time.sleep(0.01)
        work.wait()
        disttrain.all_reduce(torch.ones(1))
        recorder.end(recorder.begin("barrier", world.default_group, 3, (), (), None), FlightDumpError("barrier", "no."))
        content = recorder.content()
    _, num_slots, num_counters, entries_at = layout.LAYOUT.unpack_from(content, layout.LAYOUT_AT)
    slots_at = layout.slots_at(num_counters)
    slots = b""
    for slot in layout.SLOT.iter_unpack(content[slots_at:entries_at]):
        number, site, label, sequence, flags, began_ns, waits_ns, ended_ns, again = slot
        flags |= (waits_ns - began_ns) // 1000 * 2 if waits_ns else 0
        slots += struct.pack("@QIIIIQQQ", number, site, label, sequence, flags, began_ns, ended_ns, again)
    head = layout.LAYOUT.pack(2, num_slots, num_counters, slots_at + len(slots))
    after_layout = content[layout.LAYOUT_AT + len(head) : slots_at]
    old, _ = decode_ring(layout.MAGIC + head + after_layout + slots + content[entries_at:])
    new, _ = decode_ring(content)
    assert old.problems == ()
    assert [r.state for r in old.records] == [State.COMPLETED, State.COMPLETED, State.FAILED]
    assert [r.waits_s is None for r in old.records] == [False, True, True]
    assert new.records[0].waits_s is not None
    assert old.records[0].waits_s == pytest.approx(new.records[0].waits_s, abs=2e-6)
    assert [r._replace(waits_s=None) for r in old.records] == [r._replace(waits_s=None) for r in new.records]


def test_when_the_host_begins_to_wait() -> None:
    recorder = FlightRecorder(num_records=4)
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        work = disttrain.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        time.sleep(0.01)
        before = recorder.snapshot("asked for").records[-1]
        work.wait()
        disttrain.all_reduce(torch.ones(1))
        beside, at_once = recorder.snapshot("asked for").records
    assert (before.waits_s, at_once.waits_s) == (None, None)
    assert beside.state is State.COMPLETED
    assert beside.waits_s is not None
    assert beside.completed_s is not None
    assert 0.01 <= beside.waits_s - beside.enqueued_s <= beside.completed_s - beside.enqueued_s + 1e-6
    assert beside.wait_s == (beside.waits_s, beside.completed_s)
    assert at_once.wait_s == (at_once.enqueued_s, at_once.completed_s)


def test_stacks_that_were_written_without_the_interpreters_lock(tmp_path: Path) -> None:
    text = (
        "Timeout (0:00:01)!\nThread 0x00000000000000ff (most recent call first):\n"
        '  File "/old.py", line 1 in old\n'
        "Timeout (0:00:05)!\nThread 0x00000000000000aa (most recent call first):\n"
        '  File "/a.py", line 7 in wait\n  File "/a b.py", line 9 in run\n\n'
        'Thread 0x00000000000000bb (most recent call first):\n  File "/t.py", line 3 in <module>\n'
    )
    main, other = parse_stacks(text, 0xBB)
    assert (main.name, main.is_main, main.stack) == ("MainThread", True, (Frame("/t.py", 3, "<module>"),))
    assert (other.name, other.stack[1]) == ("thread 0xaa", Frame("/a b.py", 9, "run"))
    recorder = _used(folder=tmp_path)
    (tmp_path / f"{recorder.name}.stacks").write_text(text)
    left = read_ring(tmp_path / f"{recorder.name}.ring")
    assert {thread.name for thread in left.threads} == {"thread 0xaa", "thread 0xbb"}
    recorder.close()


def test_a_wait_is_told_once_and_begins_anew_with_each_call() -> None:
    waiting = Waiting()
    assert waiting.look(5, True, 100.0) == 0.0
    assert waiting.look(5, True, 103.0) == 3.0
    waiting.told()
    assert waiting.look(5, True, 110.0) == 0.0
    assert waiting.look(6, True, 111.0) == 0.0
    assert waiting.look(6, True, 113.0) == 2.0
    assert waiting.look(6, False, 114.0) == 0.0
    assert waiting.look(6, True, 115.0) == 1.0


_CONTENT = _used(num_records=4).ring.content()
