"""Pictures show what the timeline says."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from disttrain.pipelining import (
    Costs,
    Link,
    chrome_trace,
    draw_svg,
    draw_text,
    from_csv,
    lower,
    make_schedule,
    simulate,
)
from disttrain.pipelining.schedule.catalogue import SCHEDULE_KINDS

SVG = "{http://www.w3.org/2000/svg}"


def test_text() -> None:
    assert draw_text(simulate(make_schedule("1F1B", 2, 2))).splitlines() == [
        "1F1B · 2 ranks x 1 stage · 2 microbatches · makespan 9 · bubble 33.3% · at most 2 forwards kept",
        "F forward  B backward  · waiting",
        "",
        "rank 0 F0 F1 ·  ·  B0 -  ·  B1 -  ",
        "rank 1 ·  F0 B0 -  F1 B1 -  ·  ·  ",
    ]


def test_text_of_a_v_has_small_letters_for_the_second_stage() -> None:
    lines = draw_text(simulate(make_schedule("ZBV", 2, 1)), width=30).splitlines()
    assert lines[0].endswith("at most 2 stage forwards kept")
    assert lines[3:5] == ["rank 0 F0 ·  ·  f0 i0 w0 ·  ", "rank 1 ·  F0 f0 ·  ·  i0 w0 "]
    assert lines[6:] == ["rank 0 ·  I0 W0 ", "rank 1 I0 W0 ·  "]


def test_colours_tell_kinds_and_stages_apart() -> None:
    coloured = draw_text(simulate(make_schedule("Interleaved1F1B", 1, 1)), in_colour=True).splitlines()
    assert re.findall(r"48;5;(\d+)", coloured[3]) == ["110", "153", "157", "157", "114", "114"]
    assert "waiting" not in coloured[1]


@pytest.mark.parametrize("width", [10, 40, 200])
def test_text_keeps_within_its_width(width: int) -> None:
    timeline = simulate(make_schedule("DualPipeV", 4, 12), Costs(link=Link(0.25)))
    plain = draw_text(timeline, width=width).splitlines()[2:]
    coloured = draw_text(timeline, width=width, in_colour=True).splitlines()[2:]
    assert all(len(line) <= max(width, 12) for line in plain)
    assert all(len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= max(width, 12) for line in coloured)
    assert any("\x1b[48;5;" in line for line in coloured)


@pytest.mark.parametrize("kind", SCHEDULE_KINDS, ids=lambda kind: kind.name)
def test_svg_has_a_box_for_each_computation(kind: object) -> None:
    schedule = lower(make_schedule(getattr(kind, "name", ""), 2, 4))
    timeline = simulate(schedule, Costs(link=Link(0.5)))
    root = ET.fromstring(draw_svg(timeline))
    cells = [group for group in root.iter(f"{SVG}g") if group.get("class") == "cell"]
    parts = [part for spans in timeline.compute for span in spans for part in span.action.parts]
    assert [(cell.findtext(f"{SVG}title") or "").partition(",")[0] for cell in cells] == list(map(str, parts))
    assert [cell.findtext(f"{SVG}text") for cell in cells] == [str(part.microbatch) for part in parts]
    wires = [path for path in root.iter(f"{SVG}path") if path.get("class") == "wire"]
    assert len(wires) == len(timeline.transfers)
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert texts[0].startswith(f"{schedule.name} · 2 ranks")
    assert {"forward", "waiting", "rank 0", "rank 1"} <= set(texts)
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    widest = max(float(box.get("x", 0)) + float(box.get("width", 0)) for box in root.iter(f"{SVG}rect"))
    assert widest <= float(root.get("width", 0))


def test_svg_leaves_out_numbers_that_would_not_fit() -> None:
    wide = draw_svg(simulate(make_schedule("1F1B", 2, 400)))
    root = ET.fromstring(wide)
    assert float(root.get("width", 0)) < 8300
    assert not [cell for cell in root.iter(f"{SVG}g") if cell.findtext(f"{SVG}text")]


def test_trace() -> None:
    timeline = simulate(lower(make_schedule("1F1B", 2, 2)), Costs(unshard_s=1, link=Link(0.5)))
    events = json.loads(chrome_trace(timeline))["traceEvents"]
    spans = {(event["pid"], event["name"]): event for event in events if event["ph"] == "X"}
    assert (spans[0, "0F0"]["ts"], spans[0, "0F0"]["dur"], spans[0, "0F0"]["tid"]) == (1e6, 1e6, 0)
    assert spans[1, "1RECV_F0"]["ts"] == spans[0, "0SEND_F0"]["ts"] == 2e6
    assert spans[0, "0UNSHARD"]["dur"] == 1e6
    assert spans[0, "0F0"]["args"] == {"stage": 0, "microbatch": 0}
    flows = [event for event in events if event["ph"] in "sf"]
    assert len(flows) == 2 * len(timeline.transfers) == 8
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert names == {"rank 0", "rank 1", "compute", "unshard, reduce", "sends", "receives"}


def test_pictures_of_nothing() -> None:
    timeline = simulate(from_csv("0F0\n").with_ranks([[]]))
    assert draw_text(timeline).startswith("csv · 1 rank x 1 stage · 1 microbatch · makespan 0 · bubble 0.0%")
    assert ET.fromstring(draw_svg(timeline)).tag == f"{SVG}svg"
