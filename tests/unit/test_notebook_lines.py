"""What ranks write, as a stored notebook shows it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.notebook.lines import BAR_INTERVAL_S, LineReader, plain


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\n\ntwo", ["one", "", "two"]),
        (b"10%\r20%\rdone\n", ["done"]),
        (b"windows\r\nlines\r\n", ["windows", "lines"]),
        (b"50%\r", ["50%"]),
        (b"\x1b[2K\x1b[1Aup\x1b[K\n", ["up"]),
        (b"\x1b[31mred\x1b[0m plain\n", ["\x1b[31mred\x1b[0m plain"]),
        (b"\x1b[1;31mred\n", ["\x1b[1;31mred\x1b[0m"]),
        (b"\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link\n", ["textlink"]),
        (b"back\b\bspace\ttab\x07\n", ["backspace\ttab"]),
        ("größer \N{RIGHTWARDS ARROW} ok\n".encode(), ["größer \N{RIGHTWARDS ARROW} ok"]),
        (b"no text: \xff\n", ["no text: \N{REPLACEMENT CHARACTER}"]),
        (b"", []),
    ],
)
def test_lines_are_as_they_were_last_seen(written: bytes, lines: list[str]) -> None:
    """However the bytes come."""
    for size in (1, 2, 7, 1000):
        reader = LineReader()
        found = [line for at in range(0, len(written), size) for line in reader.feed(written[at : at + size], 0.0)]
        assert found + reader.end() == lines
        assert reader.end() == []


@given(st.text())
def test_nothing_moves_a_cursor(text: str) -> None:
    shown = plain(text.replace("\n", ""))
    assert "\r" not in shown
    assert plain(shown) == shown
    assert all(letter >= " " or letter in "\t\x1b" for letter in shown)


def test_a_bar_is_shown_now_and_then() -> None:
    reader = LineReader()
    assert reader.feed(b"0%", 0.0) == []
    assert reader.feed(b"\r1%", 1.0) == []
    assert reader.feed(b"\r50%", 1.0 + BAR_INTERVAL_S) == ["50%"]
    assert reader.feed(b"\r51%", 2.0 + BAR_INTERVAL_S) == []
    assert reader.feed(b"\r100%\nnext", 3.0 + BAR_INTERVAL_S) == ["100%"]
    assert reader.feed(b" line\n", 99.0) == ["next line"]
