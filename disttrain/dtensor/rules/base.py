"""What a sharding rule is: single-axis signatures of one operator call.

A rule looks at a call and lists what may lie along *one* mesh axis: a placement for each tensor operand and the one
that the result then has. `propagate` picks, axis by axis, the signature that costs least. So a rule never sees the
mesh, and the cost of choosing grows with axes times signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from disttrain.dtensor._torch import OpFacts
from disttrain.dtensor.layout import Spec
from disttrain.dtensor.placement import Placement, Replicate


@dataclass(frozen=True)
class OpCall:
    """One operator call, without values.

    `operands` are the tensor operands in the order of the arguments: the spec of a DTensor, None for a plain scalar
    tensor. `output_shape` is the global shape of the (first) result.
    """

    facts: OpFacts
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    operands: tuple[Spec | None, ...]
    output_shape: tuple[int, ...]

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument called `name`, however it was given."""
        if name in self.keywords:
            return self.keywords[name]
        position = self.facts.arguments.index(name) if name in self.facts.arguments else len(self.arguments)
        return self.arguments[position] if position < len(self.arguments) else default


@dataclass(frozen=True)
class Signature:
    """Along one axis: what each operand must be, and what the result is then."""

    operands: tuple[Placement, ...]
    result: Placement


Rule = Callable[[OpCall], Sequence[Signature]]


def all_replicated(call: OpCall) -> Signature:
    """The signature that every deterministic operator has."""
    return Signature((Replicate(),) * len(call.operands), Replicate())
