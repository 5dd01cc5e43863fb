"""A real terminal: one that is slow blocks nobody, and what workers print leaves no line."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from disttrain_launch.output.terminal.screen import Outlet, Screen
from disttrain_launch.output.terminal.text import cut, harmless, width
from tests.surroundings.terminal import Terminal


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """Where a terminal is read, and where it is written."""
    reading, writing = pty.openpty()
    tty.setraw(writing)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_a_terminal_that_shows_nothing_blocks_nobody(ends: tuple[int, int]) -> None:
    reading, writing = ends
    outlet = Outlet(writing)
    written = b"".join(b"%06d\n" % number for number in range(50_000))

    def put() -> None:
        for first in range(0, len(written), 700):
            outlet.put(written[first : first + 700])

    putting = threading.Thread(target=put, daemon=True)
    putting.start()
    putting.join(60.0)
    assert not putting.is_alive()
    assert outlet.is_congested
    assert os.get_blocking(writing)
    # Nothing is lost to who waits until all is shown.
    flushing = threading.Thread(target=outlet.flush, args=(None,), daemon=True)
    flushing.start()
    read = bytearray()
    while len(read) < len(written):
        read += os.read(reading, 1 << 16)
    flushing.join(60.0)
    assert not flushing.is_alive()
    assert read == written


def test_the_width_is_that_of_the_terminal_which_is_written_to(ends: tuple[int, int]) -> None:
    reading, writing = ends
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    screen = Screen(Outlet(writing), is_terminal=True)
    screen.show_bar(b"[rank 0] ", b"0123456789" * 5, 0.0, is_bar=True)
    assert os.read(reading, 1 << 10) == b"[rank 0] 01234567890123456789"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"\x1b[1;32mgreen\x1b[0m\x1b[K\n", b"\x1b[1;32mgreen\x1b[0m\x1b[K\n"),
        (b"\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n", b"\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n"),
        (b"a\x1b[Ab\x1b[2Jc\x1b[3;4Hd\x1b[?1049he\n", b"abcde\n"),
        (b"a\x1bcb\x1b7c\x1bMd\x1b(0e\n", b"abcde\n"),
        (b"a\x1b]0;title\x07b\x1b]0;no end\nc\n", b"ab\nc\n"),
        (b"a\x0bb\x0cc\xc2\x9bd\x1b\ne\t\x1b[12", b"abcd\ne\t"),
        ("größer 日本".encode(), "größer 日本".encode()),
    ],
)
def test_sequences_that_leave_the_line_are_left_out(printed: bytes, shown: bytes) -> None:
    assert harmless(printed) == shown


def test_a_table_stays_in_its_place_whatever_workers_print() -> None:
    terminal = Terminal(columns=40, num_rows=8)
    screen = terminal.screen()
    screen.show_lines(b"first\n")
    for number in range(3):
        screen.show_table([b"---", b"step %d" % number])
        screen.show_lines(b"line %d\x1b[2A\n" % number)
        screen.show_bar(b"", b"%d0%%\x1b[A" % number, 0.0, is_bar=True)
    assert terminal.shown() == ["first", "line 0", "line 1", "line 2", "---", "step 2", "20%"]


def test_colours_that_are_not_ended_do_not_reach_the_table(tmp_path: Path) -> None:
    file = tmp_path / "screen"
    screen = Screen(Outlet(os.open(file, os.O_WRONLY | os.O_CREAT)), is_terminal=True)
    screen.show_table([b"---"])
    screen.show_lines(b"\x1b[31mred\n")
    os.close(screen.outlet.fd)
    assert file.read_bytes().endswith(b"\x1b[31mred\n\x1b[0m---")


def test_wide_letters_take_two_columns_and_accents_none() -> None:
    assert width("日本a\u0301".encode()) == 5
    assert cut("日本語".encode(), 5) == "日本".encode()
    assert cut(b"a\tb\x1b]8;;x\x07c", 4) == b"a bc"
