"""The parts of the example that need no ranks: flags, text, record, and what numbers look like on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lm import flags
from lm import record as record_module
from lm.model import PRESETS, Llama
from lm.record import Record, Row
from lm.screen import readable
from lm.text import Text, read_text

from disttrain.console import clock, short
from disttrain.errors import SettingError


def files(folder: Path, num_files: int) -> str:
    for number in range(num_files):
        path = folder / f"part-{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"file {number} " * 8)
    return str(folder)


def batch(text: Text, step: int, seed: int = 0) -> torch.Tensor:
    return text.batch(step, seed=seed, batch_size=6, seq_size=16)


def test_a_batch_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    text = read_text(files(tmp_path, 60), 16)
    assert batch(text, 3).shape == (6, 17)
    assert torch.equal(batch(text, 3), batch(read_text(str(tmp_path), 16), 3))
    assert not torch.equal(batch(text, 3), batch(text, 4))
    assert not torch.equal(batch(text, 3), batch(text, 3, seed=1))


def test_held_out_files_are_never_trained_on(tmp_path: Path) -> None:
    text = read_text(files(tmp_path, 60), 16)
    sides = [set(bytes(side.tolist()).split(b"\0")) for side in (text.training, text.held_out)]
    assert sides[0] | sides[1] == {f"file {number} ".encode() * 8 for number in range(60)}
    assert not sides[0] & sides[1]
    assert text.num_files == 60


def test_a_file_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    before = read_text(files(tmp_path, 60), 16).held_out
    after = read_text(files(tmp_path, 90), 16).held_out
    assert set(bytes(before.tolist()).split(b"\0")) <= set(bytes(after.tolist()).split(b"\0"))


def test_held_out_batches_reach_from_end_to_end(tmp_path: Path) -> None:
    text = read_text(files(tmp_path, 60), 16)
    batches = list(text.held_out_batches(2, batch_size=3, seq_size=16))
    assert [tuple(rows.shape) for rows in batches] == [(3, 17), (3, 17)]
    assert batches[0][0].tolist() == text.held_out[:17].tolist()
    assert batches[1][-1].tolist() == text.held_out[-17:].tolist()


def test_a_single_file_has_its_end_held_out(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_bytes(bytes(range(1, 251)) * 2)
    text = read_text(str(tmp_path), 16)
    assert (len(text.training), len(text.held_out)) == (475, 25)


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    files(tmp_path, 60)
    expected = read_text(str(tmp_path), 16)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0" * 100)
    (tmp_path / ".hidden").write_text("secret" * 100)
    assert torch.equal(read_text(str(tmp_path), 16).training, expected.training)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match=r"has 284 bytes of text in 5 files; 14 of them are held out, fewer than --seq 128 \+ 1"
    ):
        read_text(files(tmp_path, 5), 128)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--batch", "3"], "2 ranks cannot share --batch 3 evenly"),
        (["--steps", "0"], "argument --steps: '0' is not a whole number above 0"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number above 0"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number"),
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--resume"], "there is no checkpoint in runs"),
        (["--resume", "--out", "there"], "there is no checkpoint in there"),
    ],
)
def test_nonsense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError) as caught:
        flags.parse(arguments, 2)
    assert problem in caught.value.problem
    assert "\n" not in str(caught.value)


def finished_run(*arguments: str) -> Path:
    parsed = flags.parse(arguments, 2)
    flags.save(parsed)
    (parsed.out / flags.CHECKPOINTS / "step-00000007").mkdir(parents=True)
    return Path(parsed.out)


def test_each_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert finished_run() == Path("runs/lm-1")
    assert finished_run() == Path("runs/lm-2")
    assert finished_run("--out", "mine") == Path("mine")
    assert flags.parse(["--resume"], 2).out == Path("runs/lm-2")
    with pytest.raises(SettingError, match="mine has a run in it already"):
        flags.parse(["--out", "mine"], 2)


def test_a_resumed_run_has_its_flags_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finished_run("--preset", "tiny", "--seq", "32", "--lr", "0.01", "--steps", "7")
    resumed = flags.parse(["--resume", "--steps", "9"], 2)
    assert (resumed.preset, resumed.seq, resumed.lr, resumed.steps) == ("tiny", 32, 0.01, 9)
    with pytest.raises(SettingError, match="the run in runs/lm-1 has --seq 32, not 64"):
        flags.parse(["--resume", "--seq", "64"], 2)


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


def test_a_position_sees_only_what_is_before_it() -> None:
    model = Llama(PRESETS["tiny"])
    model.init()
    tokens = torch.arange(24).view(2, 12)
    changed = tokens.clone()
    changed[:, 8:] += 100
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 256)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert not torch.isclose(before[:, 8:], after[:, 8:]).all(-1).any()


def test_no_control_sequence_reaches_the_screen() -> None:
    assert readable(b"a\x1b[2Jb\r\n\tc\xff") == "a\ufffd[2Jb\ufffd\n\tc\ufffd"


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
