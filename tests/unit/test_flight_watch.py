"""`disttrain-flight watch`: what it sees in the rings of a job, which take no part in it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch

import disttrain
from disttrain.flight_recorder import FlightRecorder
from disttrain.flight_recorder.cli import main
from disttrain.flight_recorder.live import watch as watch_module
from disttrain.flight_recorder.live.live import SILENT_S, look
from disttrain.flight_recorder.live.watch import lines_of
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore

WORLD_SIZE = 3


def enter_second(recorder: FlightRecorder, world: World) -> None:
    """A call that does not end, begun as deep below as collectives begin it."""

    def issue() -> None:
        recorder.begin("all_reduce", world.default_group, 2, [torch.ones(4)], [], None)

    def all_reduce() -> None:
        issue()

    all_reduce()


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """Rings of a job in which ranks 0 and 2 are in the second collective and rank 1 is not."""
    store = HashStore()
    for rank in range(WORLD_SIZE):
        world = World(store, rank, WORLD_SIZE, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
        recorder = FlightRecorder(num_records=8)
        with entered_world(world):
            recorder.attach(world, tmp_path)
            disttrain.all_reduce(torch.ones(4))
            if rank != 1:
                world.module = "layers.3"
                enter_second(recorder, world)
            recorder.ring.beat()
            # The world's end would remove the file.
            world.recorder = None
    (tmp_path / "rank-00009.other.ring").write_bytes(b"nothing of ours")
    return tmp_path


def test_who_waits_for_whom(hang: Path) -> None:
    sight = look(hang, time.time() + 12)
    assert sight is not None
    assert (sight.world_size, sight.num_seen) == (WORLD_SIZE, WORLD_SIZE)
    assert [(row.ranks, row.call, row.state, row.purpose, row.waits_for) for row in sight.rows] == [
        ((0, 2), "all_reduce #2 of world", "in it", "layers.3", "rank 1"),
        ((1,), "all_reduce #1 of world", "done", "", ""),
    ]
    assert sight.rows[0].since_s == pytest.approx(12, abs=5)
    (sentence,) = sight.waits
    assert sentence.startswith("ranks 0, 2 wait for rank 1 in all_reduce #2 of world, for 1")
    assert sight.notes == ("rank-00009.other.ring is not a ring of disttrain's flight recorder.",)


def test_a_moving_job(hang: Path) -> None:
    sight = look(hang, time.time())
    assert sight is not None
    assert sight.waits == ()
    assert not any(row.is_held_up for row in sight.rows)


def test_silent_ranks_are_held_up(hang: Path) -> None:
    sight = look(hang, time.time() + SILENT_S + 10)
    assert sight is not None
    assert all(row.state.startswith("no sign for ") and row.is_held_up for row in sight.rows)


def test_ranks_whose_process_is_gone(hang: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), 0)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    sight = look(hang)
    assert sight is not None
    assert {row.state for row in sight.rows} == {"process is gone"}
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    sight = look(hang)
    assert sight is not None
    assert {row.state for row in sight.rows} == {"in it", "done"}


def test_once(hang: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(hang), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 of 3 ranks" in lines[0]
    assert lines[1].startswith("  ranks 0, 2  all_reduce #2 of world at test_flight_watch.py:")
    assert lines[2].startswith("  rank 1      all_reduce #1 of world at test_flight_watch.py:")


def test_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path), "--once"]) == watch_module.NO_JOB
    assert capsys.readouterr().out == f"no job records into {tmp_path}\n"
    assert main(["watch", str(tmp_path / "absent"), "--once"]) == 2
    assert "cannot be opened: No such file or directory. Name the DISTTRAIN_FLIGHT_DIR" in capsys.readouterr().err


def test_the_folder_is_that_of_the_setting(
    hang: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTTRAIN_FLIGHT_DIR", str(hang))
    assert main(["watch", "--once"]) == 0
    assert "3 of 3 ranks" in capsys.readouterr().out


def test_it_goes_on_until_interrupted(
    hang: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rests: list[float] = []

    def sleep(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["watch", str(hang), "--every", "0.5"]) == 0
    assert all(rest > 0 for rest in rests)
    assert capsys.readouterr().out.count("3 of 3 ranks") == 2


def test_names_do_not_command_the_terminal(tmp_path: Path) -> None:
    recorder = FlightRecorder(num_records=8)
    with entered_world(World(HashStore(), 0, 1, backend="fake", timeout_s=1.0, device=torch.device("cpu"))) as world:
        recorder.attach(world, tmp_path)
        world.module = "\x1b[2J"
        disttrain.all_reduce(torch.ones(4))
        world.recorder = None
    lines = lines_of(look(tmp_path), tmp_path)
    assert "(\\x1b[2J)" in lines[1]


def test_the_table(hang: Path) -> None:
    console = pytest.importorskip("rich.console").Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(watch_module._table(look(hang, time.time() + 12), hang, 24))
    lines = console.export_text().splitlines()
    assert "q ends" in lines[0]
    assert lines[2].split() == ["ranks", "last", "call", "at", "made", "for", "state", "how", "long", "waits", "for"]
    assert lines[3].startswith("0, 2")
    assert lines[-1].startswith("! ranks 0, 2 wait for rank 1")
    console.file.close()
