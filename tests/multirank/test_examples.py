"""The small examples, on ranks that are there already: what each of them shows is so."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

import disttrain
from disttrain.testing import RankPool


def printed(name: str, argv: list[str], num_steps: int) -> str:
    """Rank task: the example's `main`, in the world that is there; a training that has more steps makes so many."""
    example = importlib.import_module(name)
    with (
        mock.patch.object(example, "STEPS", num_steps) if num_steps else contextlib.nullcontext(),
        mock.patch.object(sys, "argv", [f"{name}.py", *argv]),
        mock.patch.object(disttrain, "init_process_group"),
        mock.patch.object(disttrain, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        example.main()
    return out.getvalue()


class Run:
    """Runs an example, and gives what all its ranks print."""

    def __init__(self, rank_pool: RankPool) -> None:
        self._pool = rank_pool

    def __call__(self, num_ranks: int, name: str, *argv: str | Path, num_steps: int = 0) -> str:
        arguments = {"name": name, "argv": [str(one) for one in argv], "num_steps": num_steps}
        return "".join(self._pool.run(num_ranks, printed, arguments, timeout_s=360))


@pytest.fixture
def run(rank_pool: RankPool) -> Run:
    return Run(rank_pool)


def test_collectives(run: Run) -> None:
    lines = run(4, "collectives").splitlines()
    assert lines == [
        "the sum of all ranks: [6.0, 6.0, 6.0]",
        "the largest of each: [3, 0]",
        "a row of each rank: [[0.0, 0.0], [1.0, 1.0], [2.0, 4.0], [3.0, 9.0]]",
        "each rank's part of the sum; rank 0 has [0.0]",
        "one number to each rank, one from each: [0, 10, 20, 30]",
        "Python values: {'rank': 3, 'squares': [3, 9]}",
        "from the rank before: 3, and meanwhile a product: 64",
        "with gradients: y = 10, dy²/dx = 80",
        "in a group of 2: 2",
    ]


def test_mesh(run: Run) -> None:
    lines = run(4, "mesh").splitlines()
    beside = list(range(33, 64, 4))
    where = {"pp": 1, "dp": 1, "tp": 1}
    assert lines[0] == f"of 64 ranks as pp=2 dp=8 tp=4, rank 37 is at {where}; along dp with it are {beside}"
    assert lines[1] == "this job: DeviceMesh(cpu, dp=2 tp=2, ranks [0, 1, 2, 3])"
    assert lines[2] == "coordinates by rank: [(0, 0), (0, 1), (1, 0), (1, 1)]"
    assert lines[3] == "rank 0's sums of ranks: along tp 1, along dp 2"
    problem = "mesh: there is no axis 'pp' on dp=2 tp=2. Give one of dp, tp, or make the mesh with it."
    assert lines[-1] == f"an error is an answer: {problem}"


def test_dtensor(run: Run) -> None:
    output = run(4, "dtensor")
    losses = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+) in one process, ([\d.]+) on", output)]
    assert len(losses) == 5
    assert losses[-1][0] < losses[0][0] / 10
    assert all(one == pytest.approx(other, rel=1e-4) for one, other in losses)
    (num_calls,) = map(int, re.findall(r"^all +(\d+) ", output, re.MULTILINE))
    assert 0 < num_calls < 15
    assert "[Replicate(), Shard(0)] on dp=2 tp=2" in output
    assert re.search(r"32:64 +1, 3", output)
    (difference,) = re.findall(r"it is within (\S+) of", output)
    assert float(difference) < 1e-5


def test_tp_mlp(run: Run) -> None:
    output = run(2, "tp_mlp")
    assert "the first weight, (128, 32): each rank has (64, 32) of it" in output
    assert re.search(r"^all +1 +2,048$", output, re.MULTILINE)
    assert all(float(difference) < 1e-6 for difference in re.findall(r"differ by (\S+) at most", output))


def test_tp(run: Run) -> None:
    output, num_tokens = run(4, "tp", num_steps=8), 256
    losses, losses_alone = (
        [float(loss) for loss in re.findall(r"loss ([\d.]+), norm", text)]
        for text in (output, run(1, "tp", num_steps=8))
    )
    assert len(losses) == 8
    assert losses[-1] < 0.85 * losses[0]
    assert losses == pytest.approx(losses_alone, rel=1e-3)

    (found,) = re.findall(r"counted: ([\d,]+) bytes; the plan says ([\d,]+), and the loss sends ([\d,]+)", output)
    counted, planned, of_loss = (int(number.replace(",", "")) for number in found)
    assert counted == planned + of_loss
    # Two pairs in each of two blocks, embedding and head: each is a gather and a scatter of 64 numbers per token.
    assert planned == 10 * 64 * num_tokens * 4
    assert f"a rank of 2 sends {planned / 1e3:.1f} KB in a step of {num_tokens} tokens" in output
    # The gradients of all norms are one.
    assert re.search(r"^all_reduce +1 ", output, re.MULTILINE)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("num_ranks", "mesh", "operations"),
    [
        (2, "dp=2", {"all_gather", "reduce_scatter"}),
        (4, "replicate=2,shard=2", {"all_gather", "reduce_scatter", "all_reduce"}),
    ],
)
def test_fsdp2(run: Run, tmp_path: Path, num_ranks: int, mesh: str, operations: set[str]) -> None:
    output = run(num_ranks, "fsdp2", "--mesh", mesh, "--out", tmp_path / "saved")
    assert output.startswith(f"on {mesh.replace(',', ' ')}, each rank; the peak is in the backward of ")
    assert set(re.findall(r"^  (\w+) of 2 ranks", output, re.MULTILINE)) == operations
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 20
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000009"]


SCHEDULES = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


def numbers_in(output: str) -> dict[str, list[tuple[float, float]]]:
    """Loss and norm of the gradients of each step, by schedule."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, loss, norm in re.findall(r"(\w+), step \d: loss ([\d.]+), norm of the gradients ([\d.]+)", output):
        found.setdefault(name, []).append((float(loss), float(norm)))
    return found


def test_pipeline(run: Run) -> None:
    expected = numbers_in(run(1, "pipeline", "--schedule", "1F1B", num_steps=4))["1F1B"]  # one stage is the model
    assert len(expected) == 4
    assert expected[-1][0] < 0.85 * expected[0][0]
    output = run(4, "pipeline", "--schedule", *SCHEDULES, num_steps=2)  # the second after an optimizer's step
    found = numbers_in(output)
    assert sorted(found) == SCHEDULES
    for name, numbers in found.items():
        for own, wanted in zip(zip(*numbers, strict=True), zip(*expected[:2], strict=True), strict=True):
            assert own == pytest.approx(wanted, rel=1e-4)
        assert len(re.findall(rf"\b{name} · 4 ranks x ", output)) == 1  # the picture


def test_checkpoint(run: Run, tmp_path: Path) -> None:
    output = run(4, "checkpoint", "--out", tmp_path)
    losses = re.findall(r"loss ([\d.]+) on dp=4 tp=1, ([\d.]+) on dp=2 tp=2", output)
    assert len(losses) == 3
    assert all(float(one) == pytest.approx(float(other), rel=1e-5) for one, other in losses)
    assert "2.weight lies as [Shard(0), Shard(1)], (1, 32) of (1, 64) here" in output
    assert "'0.weight': (64, 16)" in output
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.sweep(0)
def test_huggingface(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    losses = {}
    for num_ranks in (1, 4):
        output = run(num_ranks, "huggingface", "--out", tmp_path / str(num_ranks), num_steps=6)
        losses[num_ranks] = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
        (difference,) = re.findall(r"computes the same logits but for (\S+)$", output, re.MULTILINE)
        assert float(difference) < 1e-5
    assert len(losses[4]) == 6
    assert losses[4][-1] < losses[4][0] - 0.4
    assert losses[4] == pytest.approx(losses[1], rel=1e-3)


def test_kernel(run: Run) -> None:
    lines = run(2, "kernel").splitlines()
    assert lines[0] == "computed by torch's operators, on cpu"
    differences = re.findall(r"by (\S+), its gradient by (\S+)", lines[1])
    assert all(float(one) < 1e-6 for one in differences[0])
    assert lines[2] == "compiled as one call: True"
    assert lines[3] == "on DTensors, cut as [Shard(1)]: the same: True; 0 collectives"
