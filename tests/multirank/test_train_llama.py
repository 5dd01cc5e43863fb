"""The example as a person runs it: by the launcher, from beginning to end, killed and resumed, and told nonsense."""

from __future__ import annotations

import csv
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.launching import EXAMPLES, command, environment

SCRIPT = EXAMPLES / "train_llama.py"
TINY = ("--model", "tiny", "--data", str(SCRIPT.parent), "--seq", "32", "--batch", "4", "--seed", "1")
RUN = (*TINY, "--steps", "30", "--save-every", "5", "--eval-every", "1")
LIMIT_S = 100.0


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(2, SCRIPT, *flags),
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, *flags: str) -> tuple[int, str]:
    """Exit code and output."""
    process = start(folder, *flags)
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


def kill_rank(process: subprocess.Popen[str], rank: int, save: Path) -> None:
    """End one worker as the kernel does when memory runs out, once the save is there that is written beside it."""
    workers = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == str(rank)]
    assert len(workers) == 1
    workers[0].suspend()  # else the run may end before that
    until_s = time.monotonic() + LIMIT_S / 2
    while not save.exists() and time.monotonic() < until_s:
        time.sleep(0.02)  # a folder that comes tells nobody
    workers[0].send_signal(signal.SIGKILL)


def losses(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a whole run, and what it printed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    exit_code, output = run(folder, *RUN)
    assert exit_code == 0, output
    return folder / "runs" / "llama-1", output


def test_a_run_leaves_its_losses_a_picture_and_checkpoints(undisturbed: tuple[Path, str]) -> None:
    out, _ = undisturbed
    rows = losses(out / "loss.csv")
    assert [row["step"] for row in rows] == [str(step) for step in range(31)]
    assert float(rows[-1]["held_out_loss"]) < float(rows[0]["held_out_loss"]) - 1.5
    assert float(rows[-2]["loss"]) < float(rows[0]["loss"]) - 1.5
    assert rows[-1]["loss"] == ""
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000025", "step-00000030"]


def test_a_run_tells_its_story_in_plain_lines(undisturbed: tuple[Path, str]) -> None:
    out, output = undisturbed
    assert "\x1b" not in output
    assert "\r" not in output
    assert "[rank 1]" not in output
    rows = losses(out / "loss.csv")
    first, last = float(rows[0]["held_out_loss"]), float(rows[-1]["held_out_loss"])
    lines = [line.removeprefix("[rank 0]").strip() for line in output.splitlines()]
    assert "ranks       2 on CPU, fp32" in lines
    assert "mesh        dp=2: each keeps 1/2 of the parameters" in lines
    assert f"step     0   held out {first:.3f}" in lines
    assert f"held out    {first:.3f} \N{RIGHTWARDS ARROW} {last:.3f} nats per token" in lines
    assert f"curve       {Path('runs', 'llama-1', 'loss.png')}" in lines


def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(
    undisturbed: tuple[Path, str], tmp_path: Path
) -> None:
    process = start(tmp_path, *RUN)
    assert process.stdout is not None
    for line in process.stdout:
        if "step    12   held out" in line:
            kill_rank(process, 1, tmp_path / "runs" / "llama-1" / "checkpoints" / "step-00000005")
            break
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGKILL, output
    assert "rank 1" in output
    exit_code, output = run(tmp_path, "--resume")
    assert exit_code == 0, output
    table = Path("loss.csv")
    assert losses(tmp_path / "runs" / "llama-1" / table) == losses(undisturbed[0] / table)


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (
            ("--batch", "3"),
            "train_llama: 2 ranks along dp and replicate, 1 microbatches each, cannot share --batch 3 evenly. Give a",
        ),
        (
            ("--data", "."),
            "train_llama --data: . has 0 bytes of text in 0 files; 0 of them are held out, and either side needs",
        ),
    ],
)
def test_nonsense_gets_one_line(tmp_path: Path, flags: tuple[str, ...], answer: str) -> None:
    exit_code, output = run(tmp_path, *flags)
    said = [line for line in output.splitlines() if line.startswith("[rank")]
    assert exit_code == 2, output
    assert len(said) == 1
    assert said[0].removeprefix("[rank 0] ").startswith(answer)
    assert list(tmp_path.iterdir()) == []
