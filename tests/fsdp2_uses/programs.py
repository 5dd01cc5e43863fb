"""A program: a model, the ranks that train it, and what is done with it. A plain value, printed as it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.fsdp2_uses.models import Node, Shard

__all__ = ["Node", "Program", "Shard", "Use"]


class Use:
    """One thing that is done with a model. Numbers in its options choose among what there is, by their remainders."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.options = options

    def __repr__(self) -> str:
        return f"Use({', '.join([repr(self.name), *(f'{key}={value!r}' for key, value in self.options.items())])})"


@dataclass(frozen=True)
class Program:
    """`mesh`: its shape; of two axes, the first one's ranks hold copies."""

    mesh: tuple[int, ...]
    model: Node
    uses: tuple[Use, ...]
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        """Of the world."""
        return self.mesh[0] * self.mesh[-1] if len(self.mesh) == 2 else self.mesh[0]
