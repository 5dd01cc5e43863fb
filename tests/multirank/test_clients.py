"""Libraries that look for torch.distributed's default group find disttrain's, and come to what they do on torch's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.surroundings.launching import launched

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

PROGRAM = Path(__file__).parents[1] / "clients" / "client_programs.py"


def _found(implementation: str, names: str, server: ForkServer) -> dict[str, list[float]]:
    output = launched(2, "--no-fold", PROGRAM, implementation, names, server=server).stdout
    (line,) = re.findall(r"found (\{.*\})", output)
    found: dict[str, list[float]] = json.loads(line)
    return found


@pytest.mark.parametrize(
    ("names", "needs"),
    [
        ("ddp,sync_batch_norm", []),
        ("metrics,loader", ["torchmetrics", "torchdata"]),
        ("adapters,accelerated,trainer", ["peft", "accelerate", "transformers"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_they_come_to_what_they_do_with_torch(names: str, needs: list[str], fork_server: ForkServer) -> None:
    for library in needs:
        pytest.importorskip(library)
    found = _found("disttrain", names, fork_server)
    expected = _found("torch", names, fork_server)
    assert found.keys() == expected.keys() == set(names.split(","))
    for name, numbers in found.items():
        assert numbers == pytest.approx(expected[name], rel=1e-5), name
    assert found.get("sync_batch_norm", [1.0]) == [1.0]
