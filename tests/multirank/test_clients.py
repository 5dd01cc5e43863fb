"""Libraries that look for torch.distributed's default group find disttrain's, and come to what they do on torch's."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

PROGRAM = Path(__file__).parents[1] / "clients" / "client_programs.py"


@pytest.mark.parametrize(
    ("names", "needs"),
    [
        ("ddp,sync_batch_norm", []),
        ("metrics,loader", ["torchmetrics", "torchdata"]),
        ("adapters,accelerated,trainer", ["peft", "accelerate", "transformers"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_they_come_to_what_they_do_with_torch(
    names: str, needs: list[str], fork_server: ForkServer, tmp_path: Path
) -> None:
    for library in needs:
        if find_spec(library) is None:
            pytest.skip(f"there is no {library} here")
    run = fork_server.run(PROGRAM, names, str(tmp_path), environ=os.environ)
    assert run.returncode == 0, run.stderr
    results = dict(json.loads(line) for line in run.stdout.splitlines() if line.startswith("["))
    found, expected = results["disttrain"], results["torch"]
    assert found.keys() == expected.keys() == set(names.split(","))
    for name, numbers in found.items():
        assert numbers == pytest.approx(expected[name], rel=1e-5), name
    assert found.get("sync_batch_norm", [1.0]) == [1.0]
