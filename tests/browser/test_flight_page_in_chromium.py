"""The page in a browser: it draws, answers to mouse and filters, runs nothing from a dump, asks nobody for anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from disttrain.flight_recorder.analysis.alignment.match import match
from disttrain.flight_recorder.analysis.analysis import Analysis
from disttrain.flight_recorder.analysis.judge import judge
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import Frame, ThreadStack
from disttrain.flight_recorder.views.page import as_html
from tests.flight_corpus.job import job
from tests.surroundings.chromium import Chromium

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    opened = Chromium(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def shown(chromium: Chromium, folder: Path, dumps: list[Dump], *, is_dark: bool = False) -> None:
    file = folder / "page.html"
    file.write_text(as_html(Analysis(tuple(judge(match(dumps))), tuple(dumps), ())))
    chromium.complaints.clear()
    chromium.show(file, is_dark=is_dark)


def num_colours(chromium: Chromium) -> int:
    """How many colours the timeline has: an empty one has those of its paper and its letters."""
    return int(
        chromium.value(
            "(() => { const c = document.getElementById('canvas');"
            "const bits = c.getContext('2d').getImageData(92, 30, c.width - 92, c.height - 30).data.buffer;"
            "return new Set(new Uint32Array(bits)).size; })()"
        )
    )


def on_canvas(chromium: Chromium, part: float, row: int) -> tuple[float, float]:
    left, top, width = chromium.value(
        "(() => { const box = document.getElementById('canvas').getBoundingClientRect();"
        "return [box.left, box.top, box.width] })()"
    )
    return left + width * part, top + 26 + 22 * (row + 0.5)


@pytest.mark.parametrize("is_dark", [False, True])
def test_it_draws_without_a_complaint(chromium: Chromium, tmp_path: Path, is_dark: bool) -> None:
    shown(chromium, tmp_path, job(), is_dark=is_dark)
    assert num_colours(chromium) > 8
    assert chromium.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(22, 25, 29)" if is_dark else "rgb(247, 247, 245)"
    )
    chromium.value("document.getElementById('theme').click()")
    assert chromium.value("document.documentElement.dataset.theme") == ("light" if is_dark else "dark")
    assert chromium.complaints == []


def test_pointing_and_picking(chromium: Chromium, tmp_path: Path) -> None:
    shown(chromium, tmp_path, job())
    chromium.value("scrollTo(0, document.getElementById('time').offsetTop)")
    chromium.drawn()
    x, y = on_canvas(chromium, 0.6, 2)
    chromium.mouse("Moved", x, y)
    told = chromium.value("document.getElementById('tip').innerText")
    assert "rank 2: all_reduce #12" in told
    assert "not ended when this rank was last heard of, 31.5" in told
    assert "train.py:103 in clip" in told
    chromium.mouse("Pressed", x, y, button="left", clickCount=1)
    chromium.mouse("Released", x, y, button="left", clickCount=1)
    assert "on 7 of 8 ranks" in chromium.value("document.getElementById('picked').innerText")
    assert chromium.complaints == []


def test_zooming_and_moving(chromium: Chromium, tmp_path: Path) -> None:
    shown(chromium, tmp_path, job())
    chromium.value("scrollTo(0, document.getElementById('time').offsetTop)")
    chromium.value("document.getElementById('z-before').click()")
    chromium.drawn()
    x, y = on_canvas(chromium, 0.5, 2)
    chromium.mouse("Moved", x, y)
    before = chromium.value("document.getElementById('tip').innerText")
    chromium.mouse("Pressed", x, y, button="left", clickCount=1)
    chromium.mouse("Moved", x + 400, y, button="left", buttons=1)
    chromium.mouse("Released", x + 400, y, button="left", clickCount=1)
    chromium.drawn()
    chromium.mouse("Moved", x + 400, y)
    assert before
    assert chromium.value("document.getElementById('tip').innerText") == before
    chromium.mouse("Wheel", x + 400, y, deltaX=0, deltaY=-600, modifiers=2)
    chromium.drawn()
    chromium.mouse("Moved", x + 401, y)
    assert chromium.value("document.getElementById('tip').innerText") == before
    assert chromium.complaints == []


def test_filters(chromium: Chromium, tmp_path: Path) -> None:
    shown(chromium, tmp_path, job())

    def choose(name: str, value: str) -> str:
        kind = "input" if name == "ranks" else "change"
        chromium.value(
            f"(() => {{ const f = document.getElementById('f-{name}'); f.value = '{value}';"
            f"f.dispatchEvent(new Event('{kind}')) }})()"
        )
        chromium.drawn()
        return str(chromium.value("document.getElementById('legend').innerText"))

    everything = choose("ranks", "")
    assert "all_gather_into_tensor 1,152" in everything
    assert "all_gather_into_tensor 288" in choose("ranks", "4-5")
    cards = "[...document.querySelectorAll('.card')].map(card => card.hidden)"
    assert chromium.value(cards) == [False, False]
    assert "all_gather_into_tensor 144" in choose("ranks", "5")
    assert chromium.value(cards) == [False, True]
    choose("ranks", "")
    assert choose("operation", "reduce_scatter_tensor").splitlines()[0].startswith("reduce_scatter_tensor 576")
    choose("operation", "")
    assert "all_reduce 7" in choose("state", "0")
    choose("state", "")
    assert "dp-0 (dp) 864" in choose("colour", "group")
    assert chromium.complaints == []


def test_nothing_in_a_dump_is_run(chromium: Chromium, tmp_path: Path) -> None:
    dumps = [
        replace(
            dump,
            host=EVIL,
            job=EVIL,
            reason=EVIL,
            threads=(ThreadStack(EVIL, True, (Frame(EVIL, 1, EVIL), *dump.main_stack)),),
            records=tuple(
                record._replace(module=EVIL, site=replace(record.site, group_name=EVIL, operation=EVIL, dtypes=(EVIL,)))
                for record in dump.records[-20:]
            ),
            groups=(),
        )
        for dump in job(num_steps=2)
    ]
    shown(chromium, tmp_path, dumps)
    chromium.mouse("Moved", *on_canvas(chromium, 0.6, 2))
    chromium.drawn()
    assert chromium.value("document.title") != "taken"
    assert chromium.value("document.images.length") == 0
    assert chromium.value("document.scripts.length") == 2
    assert EVIL in chromium.value("document.getElementById('stacks').textContent")
    assert chromium.complaints == []


def test_hundreds_of_ranks(chromium: Chromium, tmp_path: Path) -> None:
    """The blamed rank is in view, though it is far down."""
    shown(chromium, tmp_path, job(num_ranks=200, num_steps=3, stuck_rank=150))
    chromium.drawn()
    assert chromium.value("document.getElementById('frame').scrollTop") > 1000
    assert num_colours(chromium) > 8
    assert chromium.complaints == []
