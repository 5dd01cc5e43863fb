"""What the code of docs/fsdp2.md takes for granted: a new model where it shards one."""

from __future__ import annotations

from typing import Any

from torch import nn

NUM_RANKS = 2


def names(section: str) -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(64, 64))} if section in ("Precision", "Copies of shards") else {}
