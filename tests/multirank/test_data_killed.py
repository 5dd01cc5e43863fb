"""A job that is killed at random steps and goes on with other numbers of ranks trains on what it would have anyhow."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.multirank.killed_trainer import BATCH_SIZE, NUM_SAMPLES, NUM_STEPS, SAVE_EVERY
from tests.surroundings.launching import command, environment, launched

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

SCRIPT = Path(__file__).with_name("killed_trainer.py")
LIMIT_S = 240.0


def lines(path: Path) -> list[dict[str, Any]]:
    """Those that are whole: the last one may be cut off."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def logs(folder: Path, num_ranks: int) -> list[Path]:
    """Of an attempt with so many ranks, by rank."""
    return sorted(folder.glob(f"world-{num_ranks}-rank-*.jsonl"))


def killed(server: ForkServer, folder: Path, kind: str, num_ranks: int, victim: int, step: int) -> None:
    """Start the job, and kill a rank when it has written of `step`."""
    process = subprocess.Popen(
        command(num_ranks, SCRIPT, folder, kind, server=server),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = [path for path in logs(folder, num_ranks) if f"-rank-{victim}-" in path.name]
        if found and any(line["step"] >= step for line in lines(found[0])):
            break
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    pid = int(found[0].stem.rpartition("-")[2])
    os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0, output


def attempt(folder: Path, num_ranks: int) -> Iterator[tuple[int, list[int], float]]:
    """Each step that all ranks of an attempt have written of: its samples, in the replicas' order, and its loss."""
    for rows in zip(*map(lines, logs(folder, num_ranks)), strict=False):
        assert len({row["step"] for row in rows}) == 1
        assert len({row["loss"] for row in rows}) == 1
        yield rows[0]["step"], [sample for row in rows for sample in row["samples"]], rows[0]["loss"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["tokens", "streams"])
def test_what_is_trained_on_does_not_depend_on_kills_nor_on_the_number_of_ranks(
    fork_server: ForkServer, tmp_path: Path, kind: str
) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    launched(1, SCRIPT, undisturbed, kind, server=fork_server)
    expected = {step: (samples, loss) for step, samples, loss in attempt(undisturbed, 1)}
    assert sorted(expected) == list(range(NUM_STEPS))

    dice = random.Random()
    seed = dice.randrange(1 << 32)
    dice.seed(seed)
    first, second = dice.randrange(1, 6), dice.randrange(8, 14)
    killed(fork_server, disturbed, kind, 2, dice.randrange(2), first)
    killed(fork_server, disturbed, kind, 4, dice.randrange(4), second)
    launched(3, SCRIPT, disturbed, kind, server=fork_server)

    found: dict[int, tuple[list[int], float]] = {}
    for num_ranks in (2, 4, 3):
        steps = list(attempt(disturbed, num_ranks))
        # It goes on from the last save, and does again what came after.
        assert steps[0][0] % SAVE_EVERY == 0, seed
        assert steps[0][0] <= len(found), seed
        for step, samples, loss in steps:
            assert (samples, pytest.approx(loss, rel=1e-11)) == expected[step], (seed, num_ranks, step)
            found[step] = samples, loss
    assert sorted(found) == list(range(NUM_STEPS)), seed
    steps_per_epoch = NUM_SAMPLES // BATCH_SIZE
    for epoch in range(NUM_STEPS // steps_per_epoch):
        steps_of_epoch = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
        seen = Counter(sample for step in steps_of_epoch for sample in found[step][0])
        assert seen == Counter(range(NUM_SAMPLES)), (seed, epoch)
