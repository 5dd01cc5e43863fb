"""Every job records from its start: what it takes from the process for that, and that all of it is given back."""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import disttrain
from disttrain.errors import GroupError, SettingError
from disttrain.flight_recorder import FlightRecorder, enable, read_dump
from disttrain.process_group import current_world
from disttrain.store import HashStore


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for whoever names none."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("DISTTRAIN_FLIGHT_DIR", raising=False)
    yield tmp_path / f"disttrain-flight-{os.getuid()}"
    if disttrain.is_initialized():
        disttrain.destroy_process_group()


def _join(world_size: int = 1) -> None:
    disttrain.init_process_group("fake", store=HashStore(), rank=0, world_size=world_size)


def test_a_job_records_and_leaves_nothing(private: Path) -> None:
    threads = set(threading.enumerate())
    _join()
    recorder = current_world().recorder
    assert isinstance(recorder, FlightRecorder)
    assert enable() is recorder
    disttrain.all_reduce(torch.ones(4))
    assert [record.site.operation for record in recorder.snapshot("asked for").records] == ["all_reduce"]
    assert {file.suffix for file in private.iterdir()} == {".ring", ".stacks"}
    assert private.stat().st_mode & 0o777 == 0o700
    disttrain.destroy_process_group()
    assert not private.exists()
    assert set(threading.enumerate()) <= threads  # one of an earlier test may end meanwhile


def test_the_setting_turns_it_off_and_a_call_on_again(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTRAIN_FLIGHT_RECORDER", "0")
    _join()
    assert current_world().recorder is None
    assert not private.exists()
    assert enable() is current_world().recorder


def test_a_setting_that_cannot_be_leaves_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTRAIN_FLIGHT_SOFT_LIMIT_S", "soon")
    with pytest.raises(SettingError, match="DISTTRAIN_FLIGHT_SOFT_LIMIT_S='soon' is not valid"):
        _join()
    with pytest.raises(GroupError):
        current_world()


def test_in_a_folder_the_end_is_dumped_and_signal_and_hook_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTTRAIN_FLIGHT_DIR", str(tmp_path / "dumps"))
    hook, threads = sys.excepthook, set(threading.enumerate())
    for _ in range(2):
        _join()
        assert sys.excepthook != hook
        disttrain.destroy_process_group()
        assert sys.excepthook == hook
        assert not faulthandler.unregister(signal.SIGUSR2)
    assert [read_dump(file).reason for file in (tmp_path / "dumps").iterdir()] == ["exit", "exit"]
    for thread in set(threading.enumerate()) - threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_a_handler_that_the_script_installs_later_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setenv("DISTTRAIN_FLIGHT_DIR", str(tmp_path / "dumps"))
    _join()
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    try:
        disttrain.destroy_process_group()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
        faulthandler.unregister(signal.SIGUSR2)


def test_the_ring_is_elsewhere_than_the_dumps(private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps may go over a network; what is mapped is this machine's own, and a link leads to it."""
    monkeypatch.setenv("DISTTRAIN_FLIGHT_DIR", str(tmp_path / "dumps"))
    _join()
    (link,) = (tmp_path / "dumps").iterdir()
    assert link.resolve() == enable().ring.file
    assert link.resolve().parent == private
    disttrain.destroy_process_group()
    assert [file.suffix for file in (tmp_path / "dumps").iterdir()] == [".flight"]
    assert not private.exists()


@pytest.mark.parametrize("call", ["pipe", "posix_fallocate"])
def test_too_many_open_files_cost_the_job_nothing(
    call: str, private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    gc.collect()  # A ring stays mapped for as long as its recorder is there.
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    monkeypatch.setenv("DISTTRAIN_FLIGHT_DIR", str(tmp_path / "dumps"))
    monkeypatch.setattr(os, call, fail)
    _join()
    disttrain.all_reduce(torch.ones(4))
    assert len(enable().snapshot("asked for").records) == 1
    disttrain.destroy_process_group()
    assert set(threading.enumerate()) <= threads  # one of an earlier test may end meanwhile
    gc.collect()
    # Ends of pipes that threads hold close a moment later.
    deadline_s = time.monotonic() + 60
    while len(os.listdir("/proc/self/fd")) > files:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert not private.exists()


def test_a_recorder_that_is_replaced_is_closed(private: Path) -> None:
    _join()
    first = enable()
    FlightRecorder().attach(current_world())
    assert not private.exists()
    assert first.snapshot("asked for").records == ()


def test_the_exception_is_in_the_dump_of_a_world_that_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None:
        try:
            raise ValueError("bad batch")
        finally:
            disttrain.destroy_process_group()

    monkeypatch.setenv("DISTTRAIN_FLIGHT_DIR", str(tmp_path / "dumps"))
    _join()
    with pytest.raises(ValueError, match="bad batch"):
        train()
    (file,) = (tmp_path / "dumps").iterdir()
    dump = read_dump(file)
    assert dump.failure is not None
    assert (dump.reason, dump.failure.kind, dump.failure.message) == ("exception", "ValueError", "bad batch")


def test_on_a_full_disk_it_records_in_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fallocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    _join()
    disttrain.all_reduce(torch.ones(4))
    recorder = enable()
    assert recorder.ring.file is None
    assert len(recorder.snapshot("asked for").records) == 1
    assert "may watch for no hangs, and write no files: [Errno 28] No space left on device" in caplog.text
