"""Trackers: what they are given of reports, what happens when one fails or is slow, and runs that go on."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import disttrain
from disttrain.errors import SettingError
from disttrain.trackers import MLflow, TensorBoard, WandB, track
from disttrain.trackers.outlet import Outlet
from disttrain.trackers.steps import HOLD_S, PATIENCE_S, Steps
from disttrain.trackers.tracker import Numbers


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self, name: str = "kept") -> None:
        self.name = name
        self.opened: list[tuple[str | None, int, dict[str, Any]]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def open(self, run_id: str | None, first_step: int, config: Mapping[str, Any]) -> str:
        self.opened.append((run_id, first_step, dict(config)))
        return run_id or f"run of {self.name}"

    def log(self, numbers: Numbers, step: int, time_s: float) -> None:
        assert abs(time.time() - time_s) < 60
        self.logged.append((step, dict(numbers)))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Failing(Kept):
    """As one whose server goes away after the first step."""

    def log(self, numbers: Numbers, step: int, time_s: float) -> None:
        if self.logged:
            raise ConnectionError("the server is gone")
        super().log(numbers, step, time_s)


class Slow(Kept):
    """As one that waits for a network."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.goes_on = threading.Event()

    def log(self, numbers: Numbers, step: int, time_s: float) -> None:
        self.goes_on.wait(60)
        super().log(numbers, step, time_s)


def test_a_script_s_reports_reach_its_trackers() -> None:
    first, second = Kept("first"), Kept("second")
    with track(first, second, config={"lr": 0.1}):
        for step in range(3):
            disttrain.report(step=step, loss=2.0 - step, tokens_per_s=1e3)
            disttrain.report(step=step, held_out=0.5, of_a_tensor=object())  # type: ignore[arg-type]
    disttrain.report(step=3, loss=9.0)  # nobody hears it any more
    for tracker in (first, second):
        assert tracker.opened == [(None, 0, {"lr": 0.1})]
        assert tracker.logged == [
            (step, {"loss": 2.0 - step, "tokens_per_s": 1e3, "held_out": 0.5}) for step in range(3)
        ]
        assert tracker.is_closed


def test_reports_without_a_step_are_counted() -> None:
    kept = Kept()
    with track(kept):
        disttrain.report(loss=2.0)
        disttrain.report(loss=math.nan)
    assert [step for step, _ in kept.logged] == [0, 1]
    assert math.isnan(kept.logged[1][1]["loss"])


def test_a_run_that_is_resumed_goes_on(tmp_path: Path) -> None:
    for first_step, expected in ((0, None), (40, "run of kept"), (0, None)):
        kept = Kept()
        with track(kept, folder=tmp_path / "checkpoints", first_step=first_step):
            disttrain.report(step=first_step, loss=1.0)
        assert kept.opened == [(expected, first_step, {})]
    assert json.loads((tmp_path / "checkpoints" / "trackers.json").read_text()) == {"kept": "run of kept"}


def test_a_file_of_ids_that_is_broken_begins_new_runs(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text("{")
    kept = Kept()
    with track(kept, folder=tmp_path, first_step=5):
        pass
    assert kept.opened == [(None, 5, {})]


def test_a_tracker_that_fails_loses_numbers_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    failing, kept = Failing("failing"), Kept()
    with caplog.at_level(logging.WARNING), track(failing, kept):
        for step in range(5):
            disttrain.report(step=step, loss=1.0)
    assert [step for step, _ in kept.logged] == [0, 1, 2, 3, 4]
    assert failing.is_closed
    said = [record.message for record in caplog.records]
    assert said == [
        "failing loses numbers, and training goes on without: ConnectionError: the server is gone",
        "failing has lost 4 of 5 steps",
    ]


def test_a_tracker_that_does_not_begin_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Refused(Kept):
        def open(self, run_id: str | None, first_step: int, config: Mapping[str, Any]) -> str:
            raise PermissionError("no API key")

    with caplog.at_level(logging.WARNING), track(Refused()):
        for step in range(3):
            disttrain.report(step=step, loss=1.0)
    assert [record.message for record in caplog.records] == [
        "kept loses numbers, and training goes on without: it does not begin: PermissionError: no API key",
        "kept has lost 3 of 3 steps",
    ]


def test_a_slow_tracker_slows_nobody(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    way = Outlet(slow, None, 0, {}, lambda *_: None, max_waiting=3)
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            way.put({"loss": 1.0}, step, time.time())
        assert time.monotonic() - began_s < 30.0
        slow.goes_on.set()
        way.close(30.0)
    num_logged = len(slow.logged)
    assert 3 <= num_logged <= 4
    assert [record.message for record in caplog.records] == [
        "slow loses numbers, and training goes on without: it is slow, and 3 steps wait for it",
        f"slow has lost {100 - num_logged} of 100 steps",
    ]


def test_a_tracker_that_hangs_does_not_keep_the_job(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    way = Outlet(slow, None, 0, {}, lambda *_: None)
    way.put({"loss": 1.0}, 0, time.time())
    way.put({"loss": 1.0}, 1, time.time())
    with caplog.at_level(logging.WARNING):
        way.close(0.2)
    slow.goes_on.set()
    assert [record.message for record in caplog.records] == [
        "slow loses numbers, and training goes on without: it did not end within 0.2 s",
        "slow has lost 1 of 2 steps",
    ]


def test_a_tracker_that_takes_long_to_begin_loses_nothing_of_a_short_run() -> None:
    class Heavy(Kept):
        """As one whose library loads for longer than the last numbers take."""

        def open(self, run_id: str | None, first_step: int, config: Mapping[str, Any]) -> str:
            time.sleep(0.5)
            return super().open(run_id, first_step, config)

    heavy = Heavy()
    way = Outlet(heavy, None, 0, {}, lambda *_: None)
    way.put({"loss": 1.0}, 0, time.time())
    way.close(0.2)
    assert heavy.logged == [(0, {"loss": 1.0})]
    assert heavy.is_closed


def test_summaries_of_steps_go_on_from_the_checkpoint() -> None:
    kept = Kept()
    summary = {"step": 20, "step_s": 0.5, "waiting_share": None, "communication_share": 0.25}
    with track(kept, first_step=10) as tracking:
        tracking.take_summary({**summary, "communication_s": {"dp": 0.125}, "lateness_s": {1: 0.0625}})
    assert kept.logged == [
        (
            30,
            {
                "time/step_s": 0.5,
                "time/communication_share": 0.25,
                "communication_s/dp": 0.125,
                "lateness_s/rank 1": 0.0625,
            },
        )
    ]


def test_two_trackers_of_one_name_are_refused() -> None:
    with pytest.raises(SettingError, match="two have one name"):
        track(Kept(), Kept())


def test_without_trackers_nothing_is_done() -> None:
    before = threading.active_count()
    with track() as tracking:
        tracking.write(0, {"loss": 1.0})
        assert threading.active_count() == before


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: WandB(project="p"), r"wandb is not installed\. Run: pip install wandb"),
        (lambda: MLflow("e"), r"mlflow is not installed\. Run: pip install mlflow-skinny"),
        (lambda: TensorBoard("runs"), r"neither tensorboard nor tensorboardX is installed\. Run: pip install tensorb"),
    ],
)
def test_a_library_that_is_missing_is_named_at_once(make: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from disttrain.trackers import tensor_board, tracker  # here, to hide libraries from them

    for module in (tensor_board, tracker):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(SettingError, match=said):
        make()


def test_ranks_reports_are_put_together_as_in_the_table() -> None:
    steps = Steps(world_size=2)
    steps.hear(0, (7, 1.0, {"loss": 1.0, "tokens_per_s": 10.0, "only": 3.0}), 0.0)
    assert list(steps.due(0.1)) == []
    steps.hear(1, (7, 1.5, {"loss": 2.0, "tokens_per_s": 20.0}), 0.2)
    assert list(steps.due(0.2)) == [(7, 1.0, {"loss": 1.5, "tokens_per_s": 30.0, "only": 3.0})]


def test_one_rank_may_report_for_all() -> None:
    steps = Steps(world_size=4)
    steps.hear(0, (0, 0.0, {"loss": 1.0}), 0.0)
    assert list(steps.due(HOLD_S - 0.1)) == []
    assert [step for step, _, _ in steps.due(HOLD_S)] == [0]


def test_a_rank_that_has_reported_is_waited_for_but_not_for_ever() -> None:
    steps = Steps(world_size=2)
    for rank in (0, 1):
        steps.hear(rank, (0, 0.0, {"rate_per_s": 1.0}), 0.0)
    assert list(steps.due(0.0)) == [(0, 0.0, {"rate_per_s": 2.0})]
    steps.hear(0, (1, 0.0, {"rate_per_s": 1.0}), 1.0)
    assert list(steps.due(1.0 + HOLD_S)) == []
    assert list(steps.due(1.0 + PATIENCE_S)) == [(1, 0.0, {"rate_per_s": 1.0})]
    steps.hear(1, (1, 0.0, {"rate_per_s": 1.0}), 70.0)
    assert list(steps.due(1000.0)) == []
    assert steps.num_late == 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=30))
def test_each_step_comes_once_and_in_order(calls: list[tuple[int, int]]) -> None:
    steps, given_out, told = Steps(world_size=3), list[int](), [-1, -1, -1]
    for number, (rank, step) in enumerate(calls):
        if step > told[rank]:  # of each rank they only grow
            told[rank] = step
            steps.hear(rank, (step, 0.0, {"n_per_s": 1.0}), float(number))
        given_out += [step for step, _, _ in steps.due(float(number))]
    for rank in range(3):
        steps.leave(rank)
    given_out += [step for step, _, _ in steps.due(1e6, all_of_them=True)]
    assert sorted(set(given_out)) == sorted(given_out)
    assert max(given_out, default=-1) == max(told)
