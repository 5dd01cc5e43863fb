"""Bytes of a worker become whole, prefixed lines; a progress bar becomes what a terminal would show of it."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.errors import LaunchError
from disttrain_launch.output.streams.logs import MAX_LINE_BYTES, LineFolder, StreamPump, log_path, open_log
from disttrain_launch.output.terminal.screen import (
    BAR_INTERVAL_S,
    Outlet,
    PlainVoice,
    Screen,
    ranks_prefix,
    terminal_variables,
)
from tests.surroundings.terminal import Terminal

CUTS = st.lists(st.integers(0, 200), max_size=12)


def fed(data: bytes, cuts: list[int]) -> bytes:
    """What comes out when `data` comes in pieces."""
    folder = LineFolder()
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    pieces = [data[start:end] for start, end in pairwise(bounds)]
    outputs = [folder.feed(piece) for piece in pieces]
    assert all(output == b"" or output.endswith(b"\n") for output in outputs)
    return b"".join(outputs) + folder.end()


@given(
    st.lists(
        st.binary(max_size=40)
        .map(lambda line: line.replace(b"\r", b"").replace(b"\n", b""))
        .filter(lambda line: b"\x1b[2K" not in line),
        max_size=8,
    ),
    CUTS,
)
def test_lines_come_out_as_they_went_in(lines: list[bytes], cuts: list[int]) -> None:
    data = b"".join(line + b"\n" for line in lines)
    assert fed(data, cuts) == data


@given(st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"\x1b[2K"]), max_size=30).map(b"".join), CUTS)
def test_where_it_is_cut_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    assert fed(data, cuts) == fed(data, [])
    assert b"\r" not in fed(data, cuts)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"no end", b"no end\n"),
        (b"10%\r20%\rdone\n", b"done\n"),
        (b"\r10%\r20%\r30%\nnext\n", b"30%\nnext\n"),
        (b"windows\r\nline\r\n", b"windows\nline\n"),
        (b"kept\r", b"kept\n"),
        (b"\x1b[?25l10%\r\x1b[2K20%\n\x1b[?25h", b"20%\n"),
    ],
)
def test_what_is_overwritten_is_folded(data: bytes, lines: bytes) -> None:
    assert fed(data, []) == lines


def test_a_bar_is_known_while_it_moves() -> None:
    folder = LineFolder()
    assert (folder.feed(b"half a"), folder.unfinished, folder.is_bar) == (b"", b"half a", False)
    assert (folder.feed(b" line\n 10%\r"), folder.unfinished, folder.is_bar) == (b"half a line\n", b" 10%", True)
    assert (folder.feed(b" 20%\r"), folder.unfinished, folder.is_bar) == (b"", b" 20%", True)
    assert (folder.feed(b" 30%\n"), folder.unfinished, folder.is_bar) == (b" 30%\n", b"", False)


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    folder = LineFolder()
    assert folder.feed(b"x" * (MAX_LINE_BYTES + 1)) == b"x" * (MAX_LINE_BYTES + 1) + b"\n"
    assert folder.unfinished == b""


def screen_on(path: Path, *, is_terminal: bool) -> Screen:
    return Screen(Outlet(os.open(path, os.O_WRONLY | os.O_CREAT)), is_terminal=is_terminal)


def test_a_pump_shows_keeps_and_remembers(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    screen = screen_on(tmp_path / "screen", is_terminal=False)
    log_file = open_log(log_path(tmp_path, 3, "stderr"), "run")
    voice = PlainVoice(screen, b"[rank 3] ")
    pump = StreamPump(reading, voice=voice, log_file=log_file, shows_bar=False, say=print)
    os.write(writing, b"one\ntwo\nhal")
    pump.drain()
    os.write(writing, b"f\r100%")
    os.close(writing)
    pump.drain()
    assert pump.is_over
    pump.close()
    assert (tmp_path / "screen").read_bytes() == b"[rank 3] one\n[rank 3] two\n[rank 3] 100%\n"
    assert (tmp_path / "rank-3" / "stderr.log").read_bytes() == b"one\ntwo\nhalf\r100%"
    assert pump.tail == "one\ntwo\nhalf\r100%"


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    for run_id in ("first", "second"):
        with open_log(tmp_path / "stdout.log", run_id) as file:
            file.write(f"of {run_id}\n".encode())
    first, _, header, second = (tmp_path / "stdout.log").read_text().splitlines()
    assert (first, second) == ("of first", "of second")
    assert header.startswith("--- run second, ")


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_text("a file is in the way")
    with pytest.raises(LaunchError, match=r"rank-0/stdout.log cannot be written: File exists\. Name another --log-dir"):
        open_log(log_path(tmp_path, 0, "stdout"), "run")


def test_off_a_terminal_a_bar_is_a_line_now_and_then(tmp_path: Path) -> None:
    screen = screen_on(tmp_path / "screen", is_terminal=False)
    for now_s, text in ((0.0, b"10%"), (BAR_INTERVAL_S - 1, b"20%"), (BAR_INTERVAL_S, b"30%")):
        screen.show_bar(b"[rank 0] ", text, now_s, is_bar=True)
    screen.show_bar(b"[rank 0] ", b"a question? ", 99.0, is_bar=False)
    assert (tmp_path / "screen").read_bytes() == b"[rank 0] 10%\n[rank 0] 30%\n"


def test_on_a_terminal_lines_go_above_the_bar(tmp_path: Path) -> None:
    screen = screen_on(tmp_path / "screen", is_terminal=True)
    first, second = (PlainVoice(screen, b"[rank %d] " % rank) for rank in (0, 1))
    first.show_bar(b"10%", is_bar=True)
    second.show_lines(b"hello\n")
    first.show_lines(b"done\n")
    second.show_lines(b"bye\n")
    clear = b"\r\x1b[2K"
    expected = (
        b"[rank 0] 10%",
        clear + b"[rank 1] hello\n[rank 0] 10%",
        clear + b"[rank 0] done\n",
        b"[rank 1] bye\n",
    )
    assert (tmp_path / "screen").read_bytes() == b"".join(expected)


def test_a_table_stays_below_the_lines_and_above_the_bar() -> None:
    terminal = Terminal(columns=40, num_rows=8)
    screen = terminal.screen()
    for number in range(6):
        screen.show_lines(b"line %d\n" % number)
        screen.show_table([b"---", b"step %d" % number])
    screen.show_bar(b"[rank 0] ", b"10%", 0.0, is_bar=True)
    assert terminal.shown()[-5:] == ["line 4", "line 5", "---", "step 5", "[rank 0] 10%"]
    screen.show_lines(b"[rank 0] done\n", ends_bar=True)
    assert terminal.shown()[-4:] == ["line 5", "[rank 0] done", "---", "step 5"]
    screen.restore()
    assert terminal.shown() == [*(f"line {number}" for number in range(6)), "[rank 0] done"]


def test_while_somebody_answers_a_question_there_is_no_table() -> None:
    terminal = Terminal(columns=40, num_rows=8)
    screen = terminal.screen()
    screen.show_table([b"---", b"step 1"])
    screen.show_bar(b"[rank 0] ", b"(Pdb) ", 0.0, is_bar=False)
    terminal.feed(b"print")
    screen.show_table([b"---", b"step 2"])
    terminal.feed(b"(x)\n")
    screen.show_lines(b"[rank 0] 3\n", ends_bar=True)
    assert terminal.shown() == ["[rank 0] (Pdb) print(x)", "[rank 0] 3", "---", "step 2"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"0123456789abcdef", b"0123456789"),
        (b"\x1b[32m01234\x1b[0m\x1b[1m56789abc\x1b[0mdef\x1b[K", b"\x1b[32m01234\x1b[0m\x1b[1m56789\x1b[0m\x1b[K"),
        (b"\x1b[32mshort\x1b[0m", b"\x1b[32mshort\x1b[0m"),
    ],
)
def test_a_bar_never_wraps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, shown: bytes) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    screen = screen_on(tmp_path / "screen", is_terminal=True)
    screen.show_bar(b"[rank 0] ", text, 0.0, is_bar=True)
    assert (tmp_path / "screen").read_bytes() == b"[rank 0] " + shown


def test_a_hidden_cursor_is_shown_again(tmp_path: Path) -> None:
    screen = screen_on(tmp_path / "screen", is_terminal=True)
    screen.show_lines(b"\x1b[?25lhidden\n")
    screen.show_bar(b"[rank 0] ", b"10%", 0.0, is_bar=True)
    screen.restore()
    assert (tmp_path / "screen").read_bytes().endswith(b"[rank 0] 10%\r\x1b[2K\x1b[?25h")


def test_workers_learn_of_a_terminal_only_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    on, off = (screen_on(tmp_path / "screen", is_terminal=is_terminal) for is_terminal in (True, False))
    assert terminal_variables({1: on, 2: on}) == {"FORCE_COLOR": "1", "COLUMNS": "90"}
    assert terminal_variables({1: on, 2: off}) == {}


def test_a_reader_that_does_not_read_blocks_nobody() -> None:
    reading, writing = os.pipe()
    outlet = Outlet(writing)
    written = b"".join(b"%07d\n" % number for number in range(100_000))
    outlet.put(written)
    assert outlet.is_waiting
    assert outlet.is_congested
    read = bytearray()
    while outlet.is_waiting:
        read += os.read(reading, 1 << 16)
        outlet.flush(0)
    os.close(writing)
    while data := os.read(reading, 1 << 16):
        read += data
    os.close(reading)
    assert bytes(read) == written


def test_nobody_reading_any_more_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    outlet = Outlet(writing)
    outlet.put(b"into the void\n")
    assert not outlet.is_waiting
    os.close(writing)


def test_prefixes_name_the_ranks_and_have_colours_on_a_terminal() -> None:
    assert ranks_prefix([3], {}, is_terminal=False) == b"[rank 3] "
    assert ranks_prefix([3], {"NO_COLOR": "1"}, is_terminal=True) == b"[rank 3] "
    assert ranks_prefix([3], {}, is_terminal=True) == b"\x1b[35m[rank 3]\x1b[0m "
    assert ranks_prefix({4, 0, 1, 2}, {}, is_terminal=False) == b"[ranks 0-2, 4] "
    assert ranks_prefix({0, 1, 2}, {}, is_terminal=True) == b"\x1b[1m[ranks 0-2]\x1b[0m "


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path) -> None:
    said: list[str] = []
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(tmp_path / "screen", "wb", buffering=0) as screen_file, open("/dev/full", "wb", buffering=0) as full:
        screen = Screen(Outlet(screen_file.fileno()), is_terminal=False)
        pump = StreamPump(reading, voice=PlainVoice(screen, b""), log_file=full, shows_bar=False, say=said.append)
        for line in (b"one\n", b"two\n"):
            os.write(writing, line)
            pump.drain()
        os.close(writing)
        pump.close()
    assert (tmp_path / "screen").read_bytes() == b"one\ntwo\n"
    assert said == ["disttrain-launch: /dev/full is not written any more: No space left on device.\n"]
