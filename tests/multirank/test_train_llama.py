"""The example as a person runs it: by the launcher, from beginning to end, and killed on the way; and told nonsense."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import psutil
import pytest
import train_llama

import disttrain
from disttrain.testing import RankPool
from tests.cases.llama import trained
from tests.surroundings.launching import EXAMPLES, command, environment

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

SCRIPT = EXAMPLES / "train_llama.py"
TINY = ("--model", "tiny", "--data", str(SCRIPT.parent), "--seq", "32", "--batch", "4", "--seed", "1")
RUN = (*TINY, "--steps", "30", "--save-every", "5", "--eval-every", "6")
LIMIT_S = 360.0


def start(server: ForkServer, folder: Path, *argv: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(2, *argv, server=server),
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_rank(server: ForkServer, rank: int) -> None:
    """End one worker as the kernel does when memory runs out."""
    psutil.Process(server.find({"RANK": str(rank), "TMPDIR": os.environ["TMPDIR"]})).send_signal(signal.SIGKILL)


def losses(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run one of whose ranks was killed on the way, and what it printed."""
    folder = tmp_path_factory.mktemp("killed")
    process = start(fork_server, folder, "--max-restarts", "1", SCRIPT, *RUN, "--out", "mine")
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        # That of step 15 has waited for the save of step 5 to be whole; at most two are kept.
        if "step    18   held out" in line:
            kill_rank(fork_server, 1)
            assert list((folder / "mine" / "checkpoints").glob("step-*"))
            break
    after, _ = process.communicate(timeout=LIMIT_S)
    output = "".join(before) + after
    assert process.returncode == 0, output
    return folder / "mine", output


def test_a_run_leaves_its_losses_a_picture_and_checkpoints(finished: tuple[Path, str]) -> None:
    out, _ = finished
    rows = losses(out / "loss.csv")
    assert [row["step"] for row in rows] == [str(step) for step in range(31)]
    assert float(rows[-1]["held_out_loss"]) < float(rows[0]["held_out_loss"]) - 1.5
    assert float(rows[-2]["loss"]) < float(rows[0]["loss"]) - 1.5
    assert rows[-1]["loss"] == ""
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000025", "step-00000030"]


def test_a_run_tells_its_story_in_plain_lines(finished: tuple[Path, str]) -> None:
    out, output = finished
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
    assert f"curve       {Path('mine', 'loss.png')}" in lines


def test_a_rank_that_is_killed_is_started_again_and_all_goes_on_as_if_nothing_had_happened(
    rank_pool: RankPool, finished: tuple[Path, str], tmp_path: Path
) -> None:
    out, output = finished
    assert "restart 1 of 1" in output
    trace = tmp_path / "trace.json"
    arguments = [*RUN, "--sample", "0", "--out", str(tmp_path), "--profile", str(trace)]
    as_launched = {"num_evaluation_batches": train_llama.NUM_EVALUATION_BATCHES}
    rank_pool.run(2, trained, {"arguments": arguments, **as_launched}, timeout_s=LIMIT_S)
    assert losses(out / "loss.csv") == losses(tmp_path / "loss.csv")
    # Profiled beside it: three steps of both ranks, with what fully_shard did in them.
    events = json.loads(trace.read_text())["traceEvents"]
    found = {(event["pid"], event["name"]) for event in events}
    assert found >= {(rank, f"ProfilerStep#{step}") for rank in (0, 1) for step in (5, 6, 7)}
    phases = {(rank, " ".join(name.split()[:2])) for rank, name in found if name.startswith("fully_shard")}
    assert phases >= {(rank, f"fully_shard {phase}") for rank in (0, 1) for phase in ("gather", "free", "reduce")}


@pytest.mark.sweep(0)
def test_a_run_that_is_told_to_go_saves_and_goes_on_as_if_nothing_had_happened(
    fork_server: ForkServer, finished: tuple[Path, str], tmp_path: Path
) -> None:
    argv = (SCRIPT, *RUN, "--sample", "0", "--out", "mine", "--auto-resume")
    process = start(fork_server, tmp_path, *argv)
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if "step    12   held out" in line:
            process.send_signal(signal.SIGTERM)
            break
    after, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == disttrain.REQUEUE_EXIT_CODE, "".join(before) + after
    assert "told to go; --resume --out mine goes on from the last checkpoint" in after
    assert 12 < len(losses(tmp_path / "mine" / "loss.csv")) < 30
    again = start(fork_server, tmp_path, *argv)
    output, _ = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, output
    out, _ = finished
    assert losses(tmp_path / "mine" / "loss.csv") == losses(out / "loss.csv")


def told(arguments: list[list[str]]) -> list[object]:
    """Rank task: the exit code, and what this rank says, with a command line for each rank."""
    world = disttrain.current_world()
    with (
        mock.patch.object(train_llama, "join", return_value=world.device),
        contextlib.redirect_stderr(io.StringIO()) as said,
        pytest.raises(SystemExit) as caught,
    ):
        train_llama.main(arguments[disttrain.get_rank()])
    return [caught.value.code, said.getvalue()]


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (
            ("--batch", "3"),
            "train_llama: 2 ranks along dp, ep and replicate, 1 microbatches each, cannot share --batch 3 evenly.",
        ),
        (
            ("--data", "."),
            "train_llama --data: . has 0 bytes of text in 0 files; 0 of them are held out, and either side needs",
        ),
    ],
)
def test_nonsense_gets_one_line(
    rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], answer: str
) -> None:
    empty = [str(tmp_path) if flag == "." else flag for flag in flags]
    found = rank_pool.run(2, told, {"arguments": [empty, empty]})
    (first_code, first_said), second = found
    assert second == [2, ""]
    assert (first_code, first_said.count("\n")) == (2, 1)
    assert first_said.replace(str(tmp_path), ".").startswith(answer)
    assert list(tmp_path.iterdir()) == []


def test_nodes_that_see_other_folders_are_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    texts, outs = [tmp_path / "a", tmp_path / "b"], [tmp_path / "c", tmp_path / "d"]
    for rank, text in enumerate(texts):
        text.mkdir()
        (text / "numbers.txt").write_text("1 2 3 " * (400 + rank))
    for name, own, answer in (
        ("data", texts, f"not all ranks find 2280 + 120 bytes in {texts[0]}, as this one does."),
        ("out", outs, f"not all ranks see {outs[0]} without a checkpoint, as this one does."),
    ):
        arguments = [[*TINY, "--out", str(outs[0]), f"--{name}", str(path)] for path in own]
        (first, said), second = rank_pool.run(2, told, {"arguments": arguments})
        assert (first, second) == (2, [2, ""])
        assert said.startswith(f"train_llama --{name}: {answer}")


def test_a_rank_that_fails_alone_ends_all_of_them(rank_pool: RankPool, tmp_path: Path) -> None:
    arguments = [[*TINY, "--out", str(tmp_path / "out")] for _ in range(2)]
    arguments[1] += ["--data", str(tmp_path / "none")]
    first, second = rank_pool.run(2, told, {"arguments": arguments})
    assert first == [2, ""]
    assert second == [
        2,
        f"train_llama --data: there is no folder {tmp_path / 'none'}. Name one with text, or shards.\n",
    ]
    assert list(tmp_path.iterdir()) == []
