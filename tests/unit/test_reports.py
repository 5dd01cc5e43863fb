"""What scripts report: a page of memory that is written without waiting, and read while it is written."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import disttrain
from disttrain import reports, settings
from disttrain.reports import PAGE_BYTES, make_page, open_page, read, write
from disttrain_launch.output.view import WorkerState
from disttrain_launch.workers.board import Board
from disttrain_launch.workers.worker import Worker


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A page that is this process's own."""
    file = tmp_path / "page"
    make_page(file)
    monkeypatch.setenv(settings.REPORT_FILE.name, str(file))
    reports._own_page.cache_clear()
    yield file
    reports._own_page.cache_clear()


def told(page: Path) -> dict[str, Any]:
    found = read(page.read_bytes())
    assert found is not None
    return found[1]


def test_the_last_report_is_what_is_read(page: Path) -> None:
    assert read(page.read_bytes()) is None
    disttrain.report(step=1, loss=2.5, tokens_per_s=1e3, lr=1e-4, note=1.0)
    disttrain.report(step=2, loss=2.25)
    assert told(page) == {"step": 2, "loss": 2.25}


def test_what_is_no_number_is_said_to_be_none(page: Path) -> None:
    values: dict[str, Any] = {
        "tensor": torch.ones(()),
        "text": "text",
        "numpy": np.float32(0.5),
        "count": np.int64(3),
        "huge": 10**400,
        "nan": math.nan,
        "yes": True,
    }
    disttrain.report(step=1 << 70, **values)
    found = told(page)
    assert math.isnan(found.pop("nan"))
    assert found == {
        "step": float(1 << 70),
        "tensor": None,
        "text": None,
        "numpy": 0.5,
        "count": 3.0,
        "huge": None,
        "yes": 1,
    }


def test_what_is_too_long_leaves_the_page_as_it_is(page: Path) -> None:
    disttrain.report(step=1)
    disttrain.report(step=2, **{f"number_{at}": 1.0 for at in range(1000)})
    disttrain.report(step=3, **{"\udc80": 1.0})
    assert told(page) == {"step": 1}


@pytest.mark.parametrize("file", ["missing", "short", ""])
def test_without_a_page_nothing_happens(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short").write_bytes(b"short")
    monkeypatch.setenv(settings.REPORT_FILE.name, str(tmp_path / file) if file else "")
    reports._own_page.cache_clear()
    assert disttrain.report(step=1) is None  # type: ignore[func-returns-value]
    reports._own_page.cache_clear()
    assert (tmp_path / "short").read_bytes() == b"short"


def test_who_reads_while_another_writes_sees_a_whole_report_or_none(page: Path) -> None:
    mapped = open_page(page)
    is_over = threading.Event()

    def scribble() -> None:
        step = 0
        while not is_over.is_set():
            step += 1
            write(mapped, {"step": step, "loss": float(step)} | {f"n{at}": float(step) for at in range(step % 50)})

    thread = threading.Thread(target=scribble)
    thread.start()
    found = [read(page.read_bytes()) for _ in range(300)]
    is_over.set()
    thread.join()
    whole = [numbers for _, numbers in filter(None, found)]
    assert all(len({float(value or 0) for value in numbers.values()}) == 1 for numbers in whole)


@pytest.mark.parametrize("junk", [b"", b"\xff" * PAGE_BYTES, os.urandom(PAGE_BYTES)])
def test_somebody_elses_bytes_are_no_report(junk: bytes) -> None:
    assert read(junk) is None
    assert read(junk.ljust(PAGE_BYTES, b"\0")) is None


def test_a_board_without_a_place_for_pages_has_none(tmp_path: Path) -> None:
    board = Board(tmp_path / "missing", 2)
    board.begin(0)
    assert (board.variables(1), board.state().workers) == ({}, ())


def test_pages_that_somebody_removes_are_not_needed(tmp_path: Path) -> None:
    board = Board(tmp_path / "pages", 1)
    assert board.variables(0) == {}
    (tmp_path / "pages").mkdir()
    board = Board(tmp_path / "pages", 1)
    board.begin(0)
    worker = Worker(("true",), {}, rank=3, local_rank=0)
    while worker.poll() is None:
        time.sleep(0.001)
    board.started(worker)
    shutil.rmtree(tmp_path / "pages")
    assert board.state().workers == (WorkerState(3, worker.pid),)
    board.begin(1)
    assert (board.state().round, board.variables(0)) == (1, {})
    for fd in (worker.stdout_fd, worker.stderr_fd):
        os.close(fd)
