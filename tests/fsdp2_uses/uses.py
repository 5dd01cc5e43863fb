"""All uses: for each a method, the same for sharded and plain models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fsdp2_uses.changing import Changing
from tests.fsdp2_uses.computing import Computing
from tests.fsdp2_uses.programs import Use
from tests.fsdp2_uses.training import Training


class Rank(Computing, Training, Changing):
    """A rank of which anything may be asked."""

    def do(self, use: Use) -> Any:
        """Do it, and say what came of it."""
        method: Callable[..., Any] = getattr(self, f"do_{use.name}")
        return method(**use.options)
