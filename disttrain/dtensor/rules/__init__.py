"""Sharding rules: one file per family of operators."""

from __future__ import annotations

from disttrain.dtensor.rules.base import OpCall, Rule, Signature
from disttrain.dtensor.rules.pointwise import COPIES, pointwise
from disttrain.dtensor.rules.reduction import is_reduction, reduction
from disttrain.dtensor.rules.stacking import stack

__all__ = ["OpCall", "Rule", "Signature", "find_rule"]


def find_rule(call: OpCall) -> Rule | None:
    """The rule of the family that the call's operator belongs to; None when it has none."""
    if call.facts.is_pointwise or call.facts.name in COPIES:
        return pointwise
    if is_reduction(call):
        return reduction
    if call.facts.name == "aten.stack":
        return stack
    return None
