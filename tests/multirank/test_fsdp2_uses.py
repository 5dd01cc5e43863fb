"""Whatever the model, and whatever is done with it in whatever order: sharded, it is as it is in one process."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain.fsdp2.grads.reduced import Receivers, hand_out
from disttrain.fsdp2.params import param_group
from tests.fsdp2_uses.__main__ import main
from tests.fsdp2_uses.generate import program_of
from tests.fsdp2_uses.programs import Node, Program, Shard, Use
from tests.fsdp2_uses.report import report_of, script_of
from tests.fsdp2_uses.run import Difference, check

NUM_SEEDS = 5
"""For each test; `python -m tests.fsdp2_uses --seconds 600` looks at more."""


@pytest.mark.parametrize("first", range(0, 10 * NUM_SEEDS, NUM_SEEDS))
def test_any_uses_of_any_model(first: int) -> None:
    for seed in range(first, first + NUM_SEEDS):
        try:
            check(program_of(seed))
        except Exception as error:
            error.add_note(f"seed {seed}; `python -m tests.fsdp2_uses --seed {seed} --seconds 1` makes it small")
            raise


FORWARD = Use("forward", batch=1, at=0, mode="train", asks=False)
BACKWARD = Use("backward", which=0, retain=False, together=False)


def test_a_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here: a gradient that takes an earlier one's place."""

    def forget(parts: Sequence[torch.Tensor], receivers: Receivers, *others: Any) -> None:
        for param in receivers:
            if param is not None:
                param.sharded.grad = None
        hand_out(parts, receivers, *others)

    monkeypatch.setattr(param_group, "hand_out", forget)
    noise = (Use("mode", training=True), Use("read", at=0), Use("optimizer", kind="sgd"))
    block = Node("residual", (Node("linear"), Node("norm", io="dict")), Shard(reshard=True))
    program = Program((2,), Node("seq", (block, Node("wide")), Shard()), (*noise, FORWARD, BACKWARD) * 2)
    report = report_of(program)
    assert report is not None
    assert report.startswith("gradient wrong")
    small = Program((1,), Node("scale", shard=Shard()), (FORWARD, BACKWARD) * 2)
    assert script_of(small).replace("batch=1", "batch=0") in report
    script = tmp_path / "small.py"
    script.write_text(script_of(small))
    with pytest.raises(Difference, match="gradient wrong: scale on rank 0"):
        runpy.run_path(str(script))


def test_by_hand_it_says_what_it_has_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0.1", "--seed", "3"]) == 0
    assert "programs from seed 3 on, 0 with a difference" in capsys.readouterr().out
