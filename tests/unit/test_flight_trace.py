"""The trace for Perfetto: a process for each rank, a track for each group, arrows for messages."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from disttrain.flight_recorder.cli import main
from disttrain.flight_recorder.dumps.dump import Dump, dump_name, write_dump
from disttrain.flight_recorder.record.record import DeviceTimes
from disttrain.flight_recorder.views.trace import trace_events
from tests.unit.flight_ranks import Rank


def two_ranks() -> list[Dump]:
    sender = Rank(0, 2).call("all_reduce", age_s=3.0).call("send", peer=1, age_s=2.0, took_s=0.5)
    receiver = Rank(1, 2).call("all_reduce", age_s=3.0).call("recv", peer=0, age_s=1.5, took_s=0.25)
    receiver.waits("all_reduce", group=(0, 1), age_s=1.0)
    return [sender.dump(at=5), replace(receiver.dump(), clock_offset_s=0.125, clock_error_s=0.001)]


def test_calls_and_tracks() -> None:
    events = list(trace_events(two_ranks()))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    calls = [event for event in events if event["ph"] == "X"]
    assert [(call["pid"], call["tid"], call["name"]) for call in calls] == [
        (0, 0, "all_reduce #1"),
        (0, 0, "send #1"),
        (1, 0, "all_reduce #1"),
        (1, 0, "recv #1"),
        (1, 16, "all_reduce #1"),
    ]
    assert [call["ts"] for call in calls] == pytest.approx([0, 1e6, 0.125e6, 1.625e6, 2.125e6], abs=1)
    assert calls[-1]["dur"] == pytest.approx(1e6, abs=1)
    assert calls[-1]["args"]["state"] == "enqueued"
    assert calls[0]["args"]["at"] == "/job/train.py:10 in step"


def test_how_far_a_gpu_has_come() -> None:
    (dump, _) = two_ranks()
    known = [DeviceTimes(), DeviceTimes(5.0), DeviceTimes(5.0, 5.002), None]
    records = tuple(dump.records[0]._replace(device=device) for device in known)
    calls = [event for event in trace_events([replace(dump, records=records)]) if event["ph"] == "X"]
    assert [call["args"].get("device") for call in calls] == [
        "has not come to it",
        "has come to it",
        "has left it after 2.000 ms",
        None,
    ]


def test_an_arrow_for_each_message() -> None:
    arrows = [event for event in trace_events(two_ranks()) if event["name"] == "message"]
    assert [(arrow["ph"], arrow["pid"], arrow["id"]) for arrow in arrows] == [("s", 0, 0), ("f", 1, 0)]
    assert arrows[0]["ts"] == pytest.approx(1e6, abs=1)
    assert 1.625e6 < arrows[1]["ts"] <= 1.875e6 + 1


def test_calls_at_the_same_time_have_tracks_of_their_own() -> None:
    calls = Rank(0, 1)
    for age_s in (3.0, 2.9, 1.0):
        calls.call("all_reduce", age_s=age_s, took_s=1.0)
    events = list(trace_events([calls.dump(at=1)]))
    assert [event["tid"] for event in events if event["ph"] == "X"] == [0, 1, 0]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["world", "world, at the same time 2"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for dump in two_ranks():
        write_dump(dumps / dump_name(dump), dump)
    file = tmp_path / "trace.json"
    main([str(dumps), "--trace", str(file), "--json"])
    assert json.loads(file.read_text())["traceEvents"] == list(trace_events(two_ranks()))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    json.loads(capsys.readouterr().out)
