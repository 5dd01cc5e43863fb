"""How far a command has come: a bar on a terminal, lines now and then elsewhere, nothing for what is short."""

from __future__ import annotations

import os
import sys

import pytest

from disttrain.checkpoint import progress as module
from disttrain.checkpoint.progress import progress


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    screen, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress("verify", 4 << 20) as advance:
            advance(1 << 20)
            advance(3 << 20)
        text = ""
        while "MB" not in text:
            text += os.read(screen, 1 << 16).decode(errors="replace")
    os.close(screen)
    assert "verify" in text
    assert "/4.2 MB" in text


def test_elsewhere_there_are_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "_LINE_EVERY_S", 0)
    with progress("verify", 4 << 20) as advance:
        advance(1 << 20)
        advance(3 << 20)
    assert capsys.readouterr().err == "verify: 1 MiB, 25%\nverify: 4 MiB, 100%\n"


def test_what_is_short_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("verify", 4 << 20) as advance:
        advance(4 << 20)
    assert capsys.readouterr().err == ""
