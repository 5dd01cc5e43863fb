"""What a run of the flagship example leaves and shows: its record, and text and numbers on the screen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from llama import record as record_module
from llama.record import Record, Row
from llama.screen import Meter, readable

from disttrain.console import clock, short
from disttrain.errors import SettingError


def test_a_record_goes_back_to_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "draw", lambda path, title, *losses: path.write_text(f"{title}: {losses}"))
    with Record(tmp_path, "before", first_step=0) as record:
        for step in range(5):
            record.add(Row(step, 5.0 - step, 5.5 if step == 0 else None))
    with Record(tmp_path, "after", first_step=3) as record:
        record.add(Row(3, 1.25, None))
        record.add(Row(4, None, 1.5))
    lines = (tmp_path / "loss.csv").read_text().splitlines()
    assert lines == ["step,loss,held_out_loss", "0,5.0,5.5", "1,4.0,", "2,3.0,", "3,1.25,", "4,,1.5"]
    drawn = (tmp_path / "loss.png").read_text()
    assert drawn == "after: ([(0, 5.0), (1, 4.0), (2, 3.0), (3, 1.25)], [(0, 5.5), (4, 1.5)])"


def test_other_ranks_write_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Record(None, "nothing", first_step=0) as record:
        record.add(Row(0, 5.0, 5.5))
    assert record.losses() == [(0, 5.0)]
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_is_asked_for_only_where_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "draw", lambda *_: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for folder, has_tensorboard in ((tmp_path, False), (None, True)):
        with Record(folder, "without", 0, has_tensorboard=has_tensorboard) as record:
            assert record.folder == folder
    with pytest.raises(SettingError, match=r"there is no TensorBoard here\. Run: pip install tensorboard"):
        Record(tmp_path, "with", 0, has_tensorboard=True)


def test_tensorboard_gets_both_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[object, ...]] = []

    class Board:
        def add_scalar(self, *values: object) -> None:
            found.append(values)

        def close(self) -> None:
            found.append(())

    monkeypatch.setattr(record_module, "_board", lambda folder: Board())
    monkeypatch.setattr(record_module, "draw", lambda *_: None)
    with Record(tmp_path, "run", 0, has_tensorboard=True) as record:
        record.add(Row(0, 5.0, 5.5))
        record.add(Row(1, None, 4.5))
    assert found == [("loss/training", 5.0, 0), ("loss/held out", 5.5, 0), ("loss/held out", 4.5, 1), ()]


def test_the_status_fits_into_a_line() -> None:
    meter = Meter(num_steps=10, first_step=0, tokens_per_step=100)
    meter.add(2.5, 0.5)
    assert meter.status(1000) == "1/10 · loss 2.500 · 200 tokens/s · 1.00kB · 0:04 left"
    meter.take_summary({"waiting_share": 0.123})
    assert meter.waiting_share == 0.123


def test_no_control_sequence_reaches_the_screen() -> None:
    assert readable("a\x1b[2Jb\r\n\tc") == "a\ufffd[2Jb\ufffd\n\tc"


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (950, "950"),
        (9994, "9.99k"),
        (9996, "10.0k"),
        (539_210, "539k"),
        (11.58e6, "11.6M"),
        (1e300, "1e+300"),
    ],
)
def test_numbers_have_three_digits(number: float, shown: str) -> None:
    assert short(number) == shown


def test_durations_are_clocks() -> None:
    assert [clock(0.4), clock(59.6), clock(3600 + 125)] == ["0:00", "1:00", "1:02:05"]
