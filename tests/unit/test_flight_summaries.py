"""Summaries of steps: what a rank tells, how all ranks' are put together, and where they are written."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import disttrain
from disttrain.errors import SettingError
from disttrain.flight_recorder import FlightRecorder, PrometheusFile, StepSummaries, TensorBoardScalars
from disttrain.flight_recorder.live.step_tally import MAX_OPEN, Ended, Tally, Windows, covered_ns, summary_of
from disttrain.flight_recorder.record.ring.tail import RingTail
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore
from disttrain.trackers import tensor_board

ANSWER_S = 60.0
SUMMARY = {
    "step": 20,
    "num_steps": 10,
    "num_ranks": 2,
    "step_s": 0.5,
    "waiting_share": 0.125,
    "communication_share": 0.25,
    "communication_s": {"dp": 0.125, 'a"b': 0.0},
    "lateness_s": {0: 0.0, 1: 0.0625},
}


def told(rank: int, step: int, waits_s: dict[str, float], num_steps: int = 10, window_s: float = 5.0) -> bytes:
    """What `rank` tells when it waited for so long in one collective of each group."""
    tally = Tally(0)
    at_ns = 0
    for name, wait_s in waits_s.items():
        end_ns = at_ns + int(wait_s * 1e9)
        tally.take(Ended(name, "dp" if name.startswith("dp") else "", "all_reduce", at_ns, at_ns, end_ns))
        at_ns = end_ns
    return tally.told(rank, step, num_steps, int(window_s * 1e9))


def test_all_ranks_together() -> None:
    windows = Windows(4)
    assert windows.hear(told(0, 10, {"world": 1.0, "dp-0": 0.5})) == []
    assert windows.hear(told(1, 10, {"world": 0.25, "dp-1": 0.5})) == []
    assert windows.hear(told(2, 10, {"world": 1.0, "dp-0": 0.0})) == []
    (summary,) = windows.hear(told(3, 10, {"world": 0.75, "dp-1": 0.5}))
    assert summary == {
        "step": 10,
        "num_steps": 10,
        "num_ranks": 4,
        "step_s": pytest.approx(0.5),
        "waiting_share": pytest.approx(4.5 / 20),
        "communication_share": pytest.approx(4.5 / 20),
        "communication_s": {"dp": pytest.approx(0.0375), "world": pytest.approx(0.075)},
        "lateness_s": pytest.approx({0: 0.0, 1: 0.075, 2: 0.05, 3: 0.025}),
    }
    assert windows.open == {}


def test_a_rank_that_tells_nothing_is_left_out() -> None:
    windows = Windows(2)
    for window in range(MAX_OPEN):
        assert windows.hear(told(0, 10 * (window + 1), {"world": 0.5})) == []
    (summary,) = windows.hear(told(0, 10 * (MAX_OPEN + 1), {"world": 0.5}))
    assert (summary["step"], summary["num_ranks"], summary["lateness_s"]) == (10, 1, {0: 0.0})
    assert len(windows.open) == MAX_OPEN


def test_messages_do_not_tell_who_is_late() -> None:
    tally = Tally(0)
    tally.take(Ended("world", "", "recv", 0, 0, 10**9))
    _, _, _, _, shares_ns, groups = json.loads(tally.told(0, 1, 1, 2 * 10**9))
    assert (shares_ns, groups) == ([10**9, 10**9], [["world", "", 10**9, 0]])


def test_what_goes_on_beside_computing_is_not_waited_for() -> None:
    tally = Tally(0)
    for began_ns, waits_ns, ended_ns in ((0, 6, 10), (2, 8, 9), (10, 14, 14), (16, 16, 18)):
        tally.take(Ended("dp", "dp", "all_reduce", began_ns * 10**9, waits_ns * 10**9, ended_ns * 10**9))
    summary = summary_of([json.loads(tally.told(0, 1, 1, 20 * 10**9))])
    assert (summary["waiting_share"], summary["communication_share"]) == (pytest.approx(0.3), pytest.approx(0.8))
    on_device = json.loads(tally.told(1, 1, 1, 20 * 10**9, host_waits=False))
    assert summary_of([on_device])["waiting_share"] is None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=8))
def test_time_that_several_cover_counts_once(spans: list[tuple[int, int]]) -> None:
    covered = {moment for began, size in spans for moment in range(began, began + size)}
    assert covered_ns([(began, began + size) for began, size in spans]) == len(covered)


@pytest.fixture
def world() -> Iterator[World]:
    made = World(HashStore(), 0, 2, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    with entered_world(made):
        yield made


def test_a_group_of_one_rank_waits_for_nobody(world: World) -> None:
    recorder = FlightRecorder()
    recorder.attach(world)
    alone = disttrain.new_group([0])
    tail = RingTail(recorder)
    for _ in range(2):
        disttrain.all_reduce(torch.ones(4), group=alone)
        assert tail.ended() == []
    disttrain.barrier()
    assert [call.operation for call in tail.ended()] == ["barrier"]


def test_the_tail_of_a_ring(world: World) -> None:
    recorder = FlightRecorder(num_records=8)
    recorder.attach(world)
    disttrain.all_reduce(torch.ones(4))
    tail = RingTail(recorder)
    assert tail.ended() == []
    disttrain.all_reduce(torch.ones(4))
    work = disttrain.all_reduce(torch.ones(4), async_op=True)
    disttrain.barrier()
    assert [call.operation for call in tail.ended()] == ["all_reduce", "barrier"]
    assert work is not None
    work.wait()
    (late,) = tail.ended()
    assert (late.group_name, late.operation) == ("world", "all_reduce")
    assert late.began_ns < late.waits_ns <= late.ended_ns
    for _ in range(20):
        disttrain.all_reduce(torch.ones(4))
    assert 0 < len(tail.ended()) <= 8
    assert tail.ended() == []
    disttrain.barrier()
    assert [call.operation for call in tail.ended()] == ["barrier"]


def test_a_hook_gets_a_summary_of_every_few_steps(world: World, caplog: pytest.LogCaptureFixture) -> None:
    recorder = FlightRecorder()
    recorder.attach(world)
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def broken(summary: dict[str, Any]) -> None:
        raise ValueError(f"broken at {summary['step']}")

    with caplog.at_level(logging.ERROR):
        summaries = StepSummaries(recorder, broken, heard.put, every_steps=2)
        for step in range(1, 5):
            disttrain.all_reduce(torch.ones(4))
            summaries.step()
            if step % 2 == 0:
                world.store.queue_push("flight/summaries", told(1, step, {"world": 0.0}, num_steps=2))
        found = [heard.get(timeout=ANSWER_S) for _ in range(2)]
    assert [(summary["step"], summary["num_steps"], summary["num_ranks"]) for summary in found] == [
        (2, 2, 2),
        (4, 2, 2),
    ]
    assert all(0 < summary["communication_s"]["world"] < summary["step_s"] for summary in found)
    assert all(summary["lateness_s"][0] == 0.0 < summary["lateness_s"][1] for summary in found)
    assert "broken at 2" in caplog.text
    recorder.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "disttrain flight summaries"]
    summaries.close()


def test_no_steps_at_all(world: World) -> None:
    recorder = FlightRecorder()
    recorder.attach(world)
    with pytest.raises(SettingError, match="every_steps=0 must be at least 1"):
        StepSummaries(recorder, every_steps=0)


def test_a_file_for_prometheus(tmp_path: Path) -> None:
    file = tmp_path / "job.prom"
    write = PrometheusFile(file, {"job": "lm"})
    write(SUMMARY | {"step": 10})
    write(SUMMARY)
    lines = file.read_text().splitlines()
    assert 'disttrain_step_number{job="lm"} 20' in lines
    assert 'disttrain_communication_seconds{job="lm",group="dp"} 0.125' in lines
    assert 'disttrain_communication_seconds{job="lm",group="a\\"b"} 0.0' in lines
    assert 'disttrain_lateness_seconds{job="lm",rank="1"} 0.0625' in lines
    assert lines.count("# TYPE disttrain_lateness_seconds gauge") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.prom"]
    PrometheusFile(file)(SUMMARY)
    assert "disttrain_step_seconds 0.5" in file.read_text().splitlines()


def test_scalars_for_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    added: dict[str, tuple[float, int]] = {}

    class Writer:
        def __init__(self, folder: str, purge_step: int | None, filename_suffix: str) -> None:
            assert (folder, purge_step) == ("runs", None)
            assert filename_suffix.endswith(".0")

        def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
            added[name] = value, step
            assert walltime > 0

        def flush(self) -> None:
            added["flushed"] = 1.0, 0

    monkeypatch.setattr(tensor_board, "find_spec", lambda name: name if name == "tensorboardX" else None)
    monkeypatch.setattr(
        tensor_board, "importlib", SimpleNamespace(import_module=lambda _: SimpleNamespace(SummaryWriter=Writer))
    )
    TensorBoardScalars("runs")(SUMMARY)
    assert added["time/step_s"] == (0.5, 20)
    assert added["communication_s/dp"] == (0.125, 20)
    assert added["lateness_s/rank 1"] == (0.0625, 20)
    assert "flushed" in added

    monkeypatch.setattr(tensor_board, "find_spec", lambda _: None)
    with pytest.raises(SettingError, match="neither tensorboard nor tensorboardX is installed"):
        TensorBoardScalars("runs")
