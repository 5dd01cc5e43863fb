"""Whom the launcher asks for dumps: its own workers, never another that has got the number; and how long it waits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from disttrain.flight_recorder import FlightRecorder
from disttrain.flight_recorder.record.process.process_state import has_handler
from disttrain.process_group import World
from disttrain.store import HashStore
from disttrain_launch.workers import dump_asking
from disttrain_launch.workers.dump_asking import Dumping


@pytest.mark.parametrize("is_own_session", [True, False])
@pytest.mark.parametrize("later_ticks", [0, 1])
@pytest.mark.parametrize("has_handler", [True, False])
def test_only_the_process_that_made_the_ring_and_handles_the_signal(
    is_own_session: bool, later_ticks: int, has_handler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(HashStore(), 0, 1, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    (tmp_path / "dumps").mkdir()
    recorder = FlightRecorder(num_records=4)
    recorder.attach(world, tmp_path, tmp_path / "dumps")
    signalled: list[tuple[int, int]] = []
    started = dump_asking.start_of(os.getpid()) + later_ticks
    monkeypatch.setattr(dump_asking, "start_of", lambda _pid: started)
    monkeypatch.setattr(dump_asking, "has_handler", lambda _pid, _number: has_handler)
    monkeypatch.setattr(os, "kill", lambda *to: signalled.append(to))
    sessions = {os.getsid(0)} if is_own_session else {1}
    dumping = Dumping(tmp_path, tmp_path / "dumps", sessions)
    (ring,) = tmp_path.glob("*.ring")
    recorder.close()
    is_asked = is_own_session and not later_ticks and has_handler
    assert signalled == ([(os.getpid(), signal.SIGUSR2)] if is_asked else [])
    assert dumping.is_over == (not is_asked)
    (tmp_path / "dumps" / "new").touch()
    (tmp_path / "dumps" / "new").rename(tmp_path / "dumps" / f"{ring.stem}.flight")
    assert dumping.is_over
    dumping.close()


def test_who_handles_a_signal_is_known() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    assert has_handler(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert not has_handler(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
