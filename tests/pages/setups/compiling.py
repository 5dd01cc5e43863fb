"""What the code of docs/compiling.md takes for granted."""

from __future__ import annotations

from typing import Any

from tests.pages.models import small_llama

NUM_RANKS = 1


def names(_: str) -> dict[str, Any]:
    return {"model": small_llama()}
