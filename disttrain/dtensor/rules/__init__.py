"""Sharding rules: one file per family of operators. Each family is a table of operators and their rules."""

from __future__ import annotations

from disttrain.dtensor.rules import rearranging, reshape, slicing, stacking, views
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature
from disttrain.dtensor.rules.pointwise import COPIES, POINTWISE
from disttrain.dtensor.rules.reduction import REDUCTION, is_reduction

__all__ = ["Compute", "OpCall", "Propagation", "Rule", "Signature", "find_rule"]

_RULES: dict[str, Rule] = {
    **rearranging.RULES,
    **reshape.RULES,
    **slicing.RULES,
    **stacking.RULES,
    **views.RULES,
}
"""By the operator's name without its overload; in-place forms share the rule of the others."""


def find_rule(call: OpCall) -> Rule | None:
    """The rule of the family that the call's operator belongs to; None when it has none."""
    name = call.facts.name
    rule = _RULES.get(name) or (_RULES.get(name[:-1]) if call.facts.is_inplace else None)
    if rule is not None:
        return rule
    if call.facts.is_pointwise or name in COPIES:
        return POINTWISE
    return REDUCTION if is_reduction(call) else None
