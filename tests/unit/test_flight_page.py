"""The page, as text: what it holds, that nothing in a dump can break out of it, and that it needs nothing else."""

from __future__ import annotations

import base64
import json
import math
import re
import stat
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.analysis import Analysis
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.flight_recorder.analysis.waiting.waits import find_waits
from disttrain.flight_recorder.cli import main
from disttrain.flight_recorder.dumps.dump import Dump, dump_name, write_dump
from disttrain.flight_recorder.record.record import Failure, Frame
from disttrain.flight_recorder.views.data import timeline_data
from disttrain.flight_recorder.views.graph import MAX_BOXES, boxes_of, draw_graph
from disttrain.flight_recorder.views.page import as_html
from disttrain.flight_recorder.views.stacks import stack_groups
from disttrain.flight_recorder.views.trace import trace_events
from tests.flight_corpus.job import job
from tests.unit.flight_ranks import Rank

EVIL = "</script><img src=x onerror=alert(1)>&'\"\u2028\ud800"


def analyzed(dumps: list[Dump], notes: tuple[str, ...] = ()) -> Analysis:
    return Analysis(tuple(judge(match(dumps))), tuple(dumps), notes)


def hang() -> list[Dump]:
    """Rank 1 is in Python, the others wait for it."""
    return [
        Rank(rank).call("all_reduce").dump(at=33)
        if rank == 1
        else Rank(rank).call("all_reduce").waits("all_reduce", 11).dump()
        for rank in range(3)
    ]


def data_of(page: str) -> dict[str, object]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return dict(json.loads(text))


def test_the_verdict_comes_first() -> None:
    analysis = analyzed(hang(), ("a note",))
    page = as_html(analysis)
    verdict = analysis.verdicts[0]
    assert page.index("Rank absent") < page.index(verdict.summary) < page.index(verdict.advice)
    assert page.index(verdict.advice) < page.index('id="canvas"') < page.index('class="graph"')
    assert "<li>a note</li>" in page
    assert data_of(page)["blamed"] == [1]


def test_it_needs_nothing_else() -> None:
    page = as_html(analyzed(hang()))
    assert not re.findall(r"(?:src|href)=|url\((?!#)|@import|https?:", page)
    assert "default-src 'none'" in page
    page.encode("ascii")


def test_names_in_dumps_are_escaped() -> None:
    dumps = []
    for dump in hang():
        records = tuple(
            record._replace(
                site=replace(record.site, operation=EVIL, group_name=EVIL, stack=(Frame(EVIL, 1, EVIL),)),
                action=EVIL,
                module=EVIL,
                error=EVIL,
            )
            for record in dump.records
        )
        groups = tuple(replace(group, group_name=EVIL, axis_name=EVIL) for group in dump.groups)
        threads = tuple(
            replace(thread, name=EVIL, stack=(Frame(EVIL, 2, EVIL), *thread.stack)) for thread in dump.threads
        )
        failure = Failure(EVIL, EVIL, (Frame(EVIL, 3, EVIL),)) if dump.rank == 1 else None
        named = {"host": EVIL, "job": EVIL, "reason": EVIL, "versions": {EVIL: EVIL}}
        dumps.append(
            replace(dump, records=records, groups=groups, threads=threads, failure=failure, **named)  # type: ignore[arg-type]
        )
    page = as_html(analyzed(dumps, (EVIL,)))
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert data_of(page)["ranks"][0]["host"] == EVIL  # type: ignore[index]


def test_columns_are_the_records() -> None:
    dumps = hang()
    data = timeline_data(dumps, 3, [1])
    for told, dump in zip(data["ranks"], dumps, strict=True):
        columns = {
            name: list(array(code, base64.b64decode(told[name])))
            for name, code in (("begun", "d"), ("lasted", "f"), ("site", "I"), ("sequence", "I"), ("state", "B"))
        }
        assert columns["begun"] == pytest.approx([r.enqueued_s - data["startS"] for r in dump.records], abs=1e-6)
        assert columns["sequence"] == [record.sequence for record in dump.records]
        assert columns["state"] == [int(record.completed_s is not None) for record in dump.records]
        assert [data["sites"][site][1] for site in columns["site"]] == ["all_reduce"] * len(dump.records)
    assert data["groups"] == [{"name": "world", "axis": "", "ranks": 3}]


def test_clocks_are_aligned() -> None:
    early, late = (Rank(rank, 2).call("all_reduce").dump(at=1) for rank in range(2))
    late = replace(late, clock_offset_s=-5.0, clock_error_s=0.001)
    begun = [array("d", base64.b64decode(rank["begun"]))[0] for rank in timeline_data([early, late], 2, [])["ranks"]]
    assert begun == pytest.approx([5.0, 0.0])


def test_a_rank_gives_its_last_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttrain.flight_recorder.views.data.MAX_RECORDS", 200)
    calls = Rank(0, 1)
    for _ in range(250):
        calls.call("all_reduce")
    (told,) = timeline_data([calls.dump(at=1)], 1, [])["ranks"]
    assert list(array("I", base64.b64decode(told["sequence"]))) == list(range(51, 251))
    assert told["leftOut"] == 50


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -1e300, 0.0])
def test_times_that_cannot_be(time_s: float) -> None:
    """As a damaged dump may have them."""
    dumps = [
        replace(
            dump,
            clock_offset_s=time_s,
            records=tuple(record._replace(enqueued_s=time_s, completed_s=time_s) for record in dump.records),
        )
        for dump in hang()
    ]
    data = timeline_data(dumps, 3, [])
    assert json.loads(json.dumps(data, allow_nan=False))["startS"] == data["startS"]
    for rank in data["ranks"]:
        assert all(map(math.isfinite, array("d", base64.b64decode(rank["begun"]))))
    assert all(math.isfinite(event.get("ts", 0.0)) for event in trace_events(dumps))


def test_boxes_are_ranks_that_are_alike() -> None:
    dumps = hang()
    found = match(dumps)
    boxes = boxes_of(find_waits(found), found.dumps, [1])
    assert [(box.ranks, box.for_ranks, box.is_blamed) for box in boxes] == [
        ((0, 2), frozenset({1}), False),
        ((1,), frozenset(), True),
    ]
    assert boxes[0].title == "all_reduce #2 of world"
    assert boxes[1].title == "in Python at train.py:33 in load"
    picture = draw_graph(boxes)
    assert picture.count("<rect") == 2
    assert picture.count('class="wire"') == 1


def test_a_circle() -> None:
    dumps = [Rank(rank, 2).waits("all_reduce", group=(0, 1) if rank else (1, 0)).dump() for rank in range(2)]
    found = match(dumps)
    boxes = boxes_of(find_waits(found), found.dumps, [])
    assert {box.ranks: box.for_ranks for box in boxes} == {(0,): frozenset({1}), (1,): frozenset({0})}
    picture = draw_graph(boxes)
    assert picture.count('class="wire"') == 2
    assert "-" not in re.findall(r'viewBox="([^"]*)"', picture)[0]


def test_many_boxes() -> None:
    dumps = [Rank(rank, 81).waits("recv", peer=rank + 1).dump() for rank in range(80)]
    found = match(dumps)
    boxes = boxes_of(find_waits(found), found.dumps, [80])
    picture = draw_graph(boxes)
    assert picture.count("<rect") == MAX_BOXES
    assert f"{81 - MAX_BOXES} smaller boxes are left out" in picture
    assert "rank 80" in picture


def test_blamed_ranks_have_cards_of_their_own() -> None:
    dumps = job(num_ranks=8, num_steps=2)
    found = match(dumps)
    groups = stack_groups(dumps, find_waits(found), [5])
    assert [(group.ranks, group.is_blamed) for group in groups] == [((5,), True), ((0, 1, 2, 3, 4, 6, 7), False)]
    assert groups[1].doing.startswith("waits in all_reduce #2 of group world")


def test_blamed_ranks_without_a_dump() -> None:
    page = as_html(analyzed([dump for dump in hang() if dump.rank != 1]))
    assert "<h3>rank 1</h3><p>no dump: nobody knows</p>" in page
    assert data_of(page)["withoutDump"] == [1]


def test_without_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    assert main([str(tmp_path), "--html", str(file)]) == Kind.NOT_ENOUGH_DATA.exit_code
    assert "Not enough data" in file.read_text()
    assert capsys.readouterr().out.startswith("1. not enough data")


def test_the_command_writes_a_private_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for dump in hang():
        write_dump(dumps / dump_name(dump), dump)
    file = tmp_path / "page.html"
    assert main([str(dumps), "--html", str(file)]) == 10
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().startswith("<!doctype html>")
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    assert main([str(dumps), "--html", str(tmp_path / "absent" / "page.html")]) == 2
    assert "cannot be written: No such file or directory." in capsys.readouterr().err
