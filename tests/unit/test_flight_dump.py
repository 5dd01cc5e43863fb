"""Dumps on disk: whole, cut off, damaged, foreign, newer; nothing but FlightDumpError comes out of a bad one."""

from __future__ import annotations

import stat
import threading
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.analysis import Analysis, analyze
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.dumps.dump import MAGIC, VERSION, Dump, dump_name, encode, write_dump
from disttrain.flight_recorder.dumps.reading.reader import decode, read_dump
from disttrain.flight_recorder.record.record import DeviceTimes, Failure, Frame, GroupProgress, State
from disttrain.flight_recorder.views.report import as_json, as_text
from tests.unit.flight_ranks import NOW_S, Rank, line

FILES = Path(__file__).parent / "flight_files"


def _dump(rank: int = 0, world_size: int = 3) -> Dump:
    calls = Rank(rank, world_size).call("broadcast", 5, peer=0).call("all_reduce", 10).call("all_reduce", 10)
    calls.call("send", 20, peer=1, shape=(2, 3)).call("all_reduce", 10, group=(0, 2), state=State.FAILED, error="no")
    return calls.waits("all_gather_into_tensor", 30).dump()


def _newer_header() -> bytes:
    return MAGIC + msgpack.packb(["dump", {"version": VERSION + 1}])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    odd_name = Frame("/job/\udcff.py", 3, "odd")
    dump = replace(_dump(), failure=Failure("KeyError", "'x'", (line(7), odd_name)), reason="uncaught exception")
    write_dump(tmp_path / "a.flight", dump)
    assert read_dump(tmp_path / "a.flight") == dump


def test_a_file_is_the_owners_and_replaced_in_one_step(tmp_path: Path) -> None:
    file = tmp_path / dump_name(_dump(7, 8))
    file.write_text("old")
    write_dump(file, _dump(7, 8))
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00007.job.flight"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        write_dump(tmp_path / "taken", _dump())
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_several_threads_may_write_a_dump(tmp_path: Path) -> None:
    dump = replace(_dump(), groups=tuple(GroupProgress(f"group {number}", (0, 1), 0, "") for number in range(1000)))
    problems: list[OSError] = []

    def write() -> None:
        for _ in range(20):
            try:
                write_dump(tmp_path / "a.flight", dump)
            except OSError as problem:
                problems.append(problem)

    threads = [threading.Thread(target=write) for _ in range(3)]
    write_dump(tmp_path / "a.flight", dump)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read_dump(tmp_path / "a.flight") == dump
    assert not problems
    assert [path.name for path in tmp_path.iterdir()] == ["a.flight"]


def test_a_loop_costs_a_record_each_and_its_site_once() -> None:
    def size(num_steps: int) -> int:
        calls = Rank(0)
        for _ in range(num_steps):
            calls.call("all_reduce")
        return len(encode(calls.dump(at=1)))

    assert (size(1001) - size(1)) / 1000 < 50


def test_a_cut_costs_the_oldest_records() -> None:
    whole = encode(_dump())
    for size in range(len(MAGIC), len(whole), 7):
        try:
            dump = decode(whole[:size])
        except FlightDumpError:
            assert size < 500
            continue
        assert dump.records == _dump().records[len(_dump().records) - len(dump.records) :]
        assert "cut off" in dump.problems[0] or "damaged" in dump.problems[0]


def test_a_changed_number_is_noticed() -> None:
    data = encode(_dump())
    place = data.index(b"all_reduce") + 3
    dump = decode(data[:place] + b"X" + data[place + 1 :])
    assert dump.problems == ("is damaged: what it says may be wrong",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a dump"),
        (b"\x80\x04junk" * 100, "is not a dump"),
        (MAGIC, "is cut off"),
        (MAGIC + msgpack.packb(["dump", {"version": VERSION, "rank": 5, "world_size": 2}]), "is damaged"),
        (_newer_header(), f"has format version {VERSION + 1}"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "rank-00000.x.flight"
    file.write_bytes(content)
    with pytest.raises(FlightDumpError, match=f"^read_dump: {file.name} {problem}"):
        read_dump(file)


def test_arrays_of_a_later_kind_are_skipped() -> None:
    head, body = encode(_dump())[: len(MAGIC)], encode(_dump())[len(MAGIC) :]
    header_size = len(msgpack.packb(next(iter(msgpack.Unpacker(_Bytes(body))))))
    more = head + body[:header_size] + msgpack.packb(["weather", "fine"]) + body[header_size:]
    assert decode(more).records == _dump().records


def test_dumps_of_all_versions_are_read() -> None:
    first = read_dump(FILES / "version-1.flight")
    assert first.problems == ()
    assert first.records == _dump().records
    assert first.failure == Failure("KeyError", "'x'", (line(7),))
    second = read_dump(FILES / "version-2.flight")
    assert second.records[:-1] == first.records[:-1]
    assert (second.records[-1].action, second.records[-1].module) == ("stage 2 microbatch 5 F", "layers.3")
    assert [(group.group_name, group.axis_name) for group in second.groups] == [("world", "dp"), ("0-2", "")]
    assert (second.clock_offset_s, second.clock_error_s) == (-1.5, 0.001)
    third = read_dump(FILES / "version-3.flight")
    assert third.records == second.records
    assert (third.device_is_busy, second.device_is_busy) == (True, None)
    assert third.threads[0].activity == "read of pipe:[7]"
    assert [group.connecting for group in third.groups] == ["", "barrier"]
    fourth = read_dump(FILES / "version-4.flight")
    assert [record.device for record in fourth.records[:3]] == [
        DeviceTimes(NOW_S - 29, NOW_S - 28, NOW_S - 28.5),
        DeviceTimes(NOW_S - 20),
        DeviceTimes(),
    ]
    assert fourth.records[0].waits_s == NOW_S - 29.5
    assert fourth.records[3:] == third.records[3:]
    fifth = read_dump(FILES / "version-5.flight")
    assert [(record.site.reduction, record.site.splits) for record in fifth.records[-2:]] == [
        ("MAX", ()),
        ("", ((1, 3), (2, 2))),
    ]
    assert fifth.records[:-2] == fourth.records
    assert encode(fifth) == (FILES / "version-5.flight").read_bytes()


def test_records_with_times_of_a_device_that_cannot_be_are_left_out() -> None:
    dump = _dump()
    known = (DeviceTimes(1.0, 2.0, 1.5), DeviceTimes(1.0), DeviceTimes(), None, None, None)
    records = [record._replace(device=device) for record, device in zip(dump.records, known, strict=True)]
    assert decode(encode(replace(dump, records=tuple(records)))).records == tuple(records)
    for wrong in ((1.0,), ("soon", None, None)):
        bad = [*records[:-1], records[-1]._replace(device=wrong)]  # type: ignore[arg-type]
        assert decode(encode(replace(dump, records=tuple(bad)))).records == tuple(records[:-1])


def test_every_flipped_bit_is_noticed_and_every_cut_answered() -> None:
    whole = encode(_dump())
    for place in range(len(MAGIC), len(whole)):
        for data in (whole[:place], whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]):
            try:
                assert decode(data).problems
            except FlightDumpError:
                continue


@settings(max_examples=30)
@given(
    damage=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=8),
    size=st.integers(0, 5000),
)
def test_whatever_is_damaged_an_answer_comes_out(damage: list[tuple[int, int]], size: int) -> None:
    data = bytearray(encode(_dump()))
    for place, value in damage:
        data[len(MAGIC) + place % (len(data) - len(MAGIC))] = value
    try:
        dump = decode(bytes(data[: max(size, len(MAGIC))]))
    except FlightDumpError:
        return
    dumps = [dump, *(_dump(rank) for rank in range(3) if rank != dump.rank)]
    analysis = Analysis(tuple(judge(match(dumps))), tuple(dumps), dump.problems)
    assert analysis.verdicts[0].summary
    assert as_text(analysis).startswith("1. ")
    assert as_json(analysis).isascii()


def test_a_folder_of_all_sorts(tmp_path: Path) -> None:
    """Two worlds, a rank twice, a cut-off file, a foreign one, others that are none of ours."""
    for rank in range(3):
        write_dump(tmp_path / f"rank-0000{rank}.job.flight", _dump(rank))
    write_dump(tmp_path / "again.flight", replace(_dump(1), dumped_s=NOW_S + 5, reason="exit"))
    write_dump(tmp_path / "rank-00000.old.flight", replace(_dump(0), job="old", started_s=NOW_S - 1000))
    (tmp_path / "cut.flight").write_bytes(encode(_dump(2))[:600])
    (tmp_path / "foreign.flight").write_bytes(b"hello")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "folder.flight").mkdir()
    analysis = analyze(tmp_path)
    assert [(dump.rank, dump.job, dump.reason) for dump in analysis.dumps] == [
        (0, "job", "SIGUSR2"),
        (1, "job", "exit"),
        (2, "job", "SIGUSR2"),
    ]
    said = "\n".join(analysis.notes)
    for words in (
        "cut.flight is cut off",
        "foreign.flight is not a dump",
        "1 other file is no dump",
        "1 dumps are of other jobs than job",
        "rank 1 has several dumps",
    ):
        assert words in said
    assert as_text(analysis).isascii()
    assert '"verdicts"' in as_json(analysis)


def test_a_folder_of_logs_has_the_dumps_in_it(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("{}")
    (tmp_path / "flight").mkdir()
    for rank in range(3):
        write_dump(tmp_path / "flight" / f"rank-0000{rank}.job.flight", _dump(rank))
    assert analyze(tmp_path) == analyze(tmp_path / "flight")
    write_dump(tmp_path / "rank-00000.other.flight", _dump(0))
    assert len(analyze(tmp_path).dumps) == 1


def test_a_report_obeys_no_escape_sequence_of_a_dump(tmp_path: Path) -> None:
    dumps = [replace(_dump(rank), reason="\x1b[2J\udcff") for rank in range(3)]
    for dump in dumps:
        write_dump(tmp_path / dump_name(dump), dump)
    text = as_text(analyze(tmp_path))
    assert "\\x1b[2J\\udcff" in text
    assert "\x1b" not in text


class _Bytes:
    """What msgpack reads from; it asks for more than there is."""

    def __init__(self, data: bytes) -> None:
        self.read = lambda _: data


def _calls(num_calls: int) -> Rank:
    calls = Rank(0, 4)
    for number in range(num_calls):
        calls.call("all_reduce", at=number % 5)
    return calls


def test_numbers_of_all_sizes_and_fields_of_all_kinds_are_read_in_runs() -> None:
    dump = _calls(40).dump(at=33)
    records = []
    for block, sequence in enumerate((1, 127, 128, 255, 256, 65535, 65536, 2**32 - 60, 2**32, 2**40)):
        for number, record in enumerate(dump.records):
            records.append(
                record._replace(
                    sequence=sequence + number,
                    error="lost" if block == 5 and number == 7 else None,
                    completed_s=None if block % 4 == 1 else record.completed_s,
                    device=(None, DeviceTimes(1.5, None, 2.5), DeviceTimes())[block % 3],
                    waits_s=3.5 if block % 2 else None,
                    action=f"step {number % 3 if block == 4 else block}",
                )
            )
    changed = replace(dump, records=tuple(records))
    assert tuple(decode(encode(changed)).records) == tuple(records)
    assert decode(encode(changed)).problems == ()
    assert encode(decode(encode(changed))) == encode(changed)


def test_no_numbers_among_times_are_left_out_in_runs() -> None:
    dump = _calls(100).dump(at=33)
    records = list(dump.records)
    records[50] = records[50]._replace(completed_s=float("nan"))
    read = decode(encode(replace(dump, records=tuple(records))))
    assert read.records == (*records[:50], *records[51:])
    assert read.problems == ("is damaged: 1 of its records cannot be",)
