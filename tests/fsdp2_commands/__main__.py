"""`python -m tests.fsdp2_commands` records what `fully_shard` does anew, where it is meant to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.fsdp2_commands.record import Commands, commands
from tests.fsdp2_commands.scenarios import SCENARIOS, ranks

GOLDEN = Path(__file__).parents[1] / "golden" / "fsdp2-commands.txt"


def text_of(scenario: Callable[[Commands], None]) -> str:
    torch.manual_seed(0)
    with ranks(4), commands() as record:
        scenario(record)
    return "\n".join(record.lines)


if __name__ == "__main__":
    texts = [f"\n=== {scenario.__name__}\n{text_of(scenario)}\n" for scenario in SCENARIOS]
    GOLDEN.write_text(
        "What fully_shard does, in order; tests/fsdp2_commands/scenarios.py says when.\n" + "".join(texts)
    )
