"""What the code of docs/launching.md takes for granted."""

from __future__ import annotations

from typing import Any


def names(_: str) -> dict[str, Any]:
    return {"step": 3, "loss": 2.5, "tokens_per_s": 1e5, "lr": 1e-3}
