"""Rings of processes that cannot speak: found, judged by what the system says of them, and copied to the dumps."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from disttrain.flight_recorder import FlightRecorder, analyze
from disttrain.flight_recorder.dumps.private_file import replace_file
from disttrain.flight_recorder.dumps.rings.orphaned_rings import collect, collect_linked, keep_silent
from disttrain.flight_recorder.dumps.rings.reader import read_ring
from disttrain.flight_recorder.record.process.process_state import GONE, STOPPED, start_of
from disttrain.flight_recorder.record.ring.ring import Ring
from disttrain.process_group import World
from disttrain.store import HashStore

SILENT_S = 60.0


class Folders:
    """A ring on this machine, and where dumps are read."""

    def __init__(self, path: Path) -> None:
        self.rings, self.dumps = path / "rings", path / "dumps"
        for folder in (self.rings, self.dumps):
            folder.mkdir()
        self.process = 0

    def start(self) -> None:
        """A process with a ring, which then waits."""
        reading, writing = os.pipe()
        self.process = os.fork()
        if not self.process:
            world = World(HashStore(), 0, 1, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
            recorder = FlightRecorder(num_records=4)
            recorder.attach(world, self.rings, self.dumps)
            recorder.ring.beat()
            os.write(writing, b".")
            signal.pause()
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)

    def names(self) -> list[str]:
        return sorted(file.name.partition(".")[2].partition(".")[2] for file in self.dumps.iterdir())


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    made = Folders(tmp_path)
    made.start()
    yield made
    os.kill(made.process, signal.SIGKILL)
    os.waitpid(made.process, 0)


def test_one_that_lives_is_left_alone(folders: Folders) -> None:
    keep_silent(folders.rings, folders.dumps, SILENT_S)
    assert folders.names() == ["ring"]
    keep_silent(folders.rings, folders.dumps, 0.0, "another job")
    assert folders.names() == ["ring"]
    keep_silent(folders.rings, folders.dumps, 0.0)
    assert folders.names() == ["kept.ring", "ring"]
    (kept,) = folders.dumps.glob("*.kept.ring")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert read_ring(kept).process == ""


@pytest.mark.parametrize(("number", "state"), [(signal.SIGKILL, GONE), (signal.SIGSTOP, STOPPED)])
def test_what_the_system_says_is_kept(folders: Folders, number: int, state: str) -> None:
    os.kill(folders.process, number)
    os.waitid(os.P_PID, folders.process, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    keep_silent(folders.rings, folders.dumps, SILENT_S)
    (dump,) = analyze(folders.dumps).dumps
    assert (dump.rank, dump.pid, dump.process) == (0, folders.process, state)
    assert len(analyze(folders.dumps).dumps) == 1


def test_what_is_left_at_the_end_takes_the_place_of_links(folders: Folders) -> None:
    os.kill(folders.process, signal.SIGKILL)
    os.waitid(os.P_PID, folders.process, os.WEXITED | os.WNOWAIT)
    (link,) = folders.dumps.iterdir()
    content = link.read_bytes()
    assert link.is_symlink()
    collect(folders.rings, folders.dumps)
    assert list(folders.rings.iterdir()) == []
    assert not link.is_symlink()
    assert link.read_bytes() == content


def test_a_number_of_a_process_is_not_a_process() -> None:
    assert start_of(os.getpid()) == start_of(os.getpid()) > 0
    assert start_of(os.getppid()) <= start_of(os.getpid())
    assert start_of(1 << 30) == 0


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("of value")
    for name in ("a.ring", f".a.flight.{os.getpid()}-{threading.get_native_id()}"):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Ring(4, tmp_path / "a.ring")
    replace_file(tmp_path / "a.flight", b"dump")
    assert target.read_text() == "of value"
    assert (tmp_path / "a.flight").read_bytes() == b"dump"


def test_where_only_links_tell_of_rings_they_are_found_by_these(tmp_path: Path) -> None:
    rings, dumps = tmp_path / "rings", tmp_path / "dumps"
    for folder in (rings, dumps / "round-1"):
        folder.mkdir(parents=True)
    others = tmp_path / "others.ring"
    for link, name in ((dumps, "a"), (dumps / "round-1", "b")):
        (rings / f"{name}.ring").write_bytes(name.encode())
        (link / f"{name}.ring").symlink_to(rings / f"{name}.ring")
    (rings / "b.stacks").write_bytes(b"stacks")
    (dumps / "others.ring").symlink_to(others)
    collect_linked(rings, dumps)
    shutil.rmtree(rings)
    assert (dumps / "a.ring").read_bytes() == b"a"
    assert (dumps / "round-1" / "b.ring").read_bytes() == b"b"
    assert (dumps / "round-1" / "b.stacks").read_bytes() == b"stacks"
    assert (dumps / "others.ring").readlink() == others
