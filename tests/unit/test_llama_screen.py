"""What a run of the flagship example leaves and shows: its record, and text and numbers on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama import record as record_module
from llama.record import Record, Row
from llama.screen import Meter, readable

from disttrain.console import clock, short


def test_a_record_goes_back_to_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "draw", lambda path, title, *losses: path.write_text(f"{title}: {losses}"))
    with Record(tmp_path, "before", first_step=0, num_batches=4) as record:
        for step in range(5):
            record.add(Row(step, 5.0 - step, 5.5 if step == 0 else None))
    with Record(tmp_path, "after", first_step=3, num_batches=4) as record:
        record.add(Row(3, 1.25, None))
        record.add(Row(4, None, 1.5))
    lines = (tmp_path / "loss.csv").read_text().splitlines()
    assert lines == ["step,loss,held_out_loss", "0,5.0,5.5", "1,4.0,", "2,3.0,", "3,1.25,", "4,,1.5"]
    drawn = (tmp_path / "loss.png").read_text()
    assert drawn == "after: ([(0, 5.0), (1, 4.0), (2, 3.0), (3, 1.25)], [(0, 5.5), (4, 1.5)], 4)"


def test_training_is_shown_as_the_mean_that_held_out_losses_are() -> None:
    assert record_module.means_of_last([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 4) == [1.0, 1.5, 2.0, 2.5, 3.5, 4.5]


def test_other_ranks_write_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Record(None, "nothing", first_step=0, num_batches=4) as record:
        record.add(Row(0, 5.0, 5.5))
    assert record.losses() == [(0, 5.0)]
    assert list(tmp_path.iterdir()) == []


def _meter(num_steps: int = 100, first_step: int = 0) -> Meter:
    return Meter(num_steps, first_step, tokens_per_step=100, eval_every=40, eval_batches=4)


def test_the_status_fits_into_a_line() -> None:
    meter = _meter(num_steps=10)
    meter.add(2.5, 0.5)
    meter.add(1.5, 0.5)
    assert meter.status(1000) == "2/10 · loss 2.000 · 200 tokens/s · 1.00kB · 0:04 left"
    meter.take_summary({"waiting_share": 0.123})
    assert meter.waiting_share == 0.123


@pytest.mark.parametrize("first_step", [0, 50])
def test_a_first_step_that_compiles_says_nothing_of_the_others(first_step: int) -> None:
    """Of a run that begins, and of one that is resumed."""
    meter = _meter(first_step=first_step)
    assert (meter.step_s, meter.tokens_per_s, meter.left_s) == (None, None, None)
    meter.add_evaluation(40.0)  # compiles, too
    meter.add(2.5, 60.0)
    assert meter.status(1000) == f"{first_step + 1}/100 · loss 2.500 · 1.00kB"
    meter.add(2.5, 0.5)
    num_evaluations = 3 if first_step == 0 else 2
    assert meter.tokens_per_s == 200.0
    assert meter.left_s == 0.5 * (98 - first_step) + 2.0 * num_evaluations
    meter.add(2.5, 30.0)  # compiles again
    meter.add(2.5, 0.5)
    assert meter.tokens_per_s == 200.0
    meter.add_evaluation(0.25)
    assert meter.left_s == 0.5 * (96 - first_step) + 0.25 * num_evaluations


def test_nothing_is_left_at_the_end_but_an_evaluation() -> None:
    meter = _meter(num_steps=2)
    meter.add(2.5, 0.5)
    meter.add(2.5, 0.5)
    assert meter.left_s == 0.0
    meter.add_evaluation(1.0)
    assert meter.left_s == 1.0


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
