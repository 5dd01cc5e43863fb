"""Sharding rules: one file per family of operators. Each family is a table of operators and their rules."""

from __future__ import annotations

from disttrain.dtensor._torch import OpFacts, OpOverload
from disttrain.dtensor.rules import (
    attention,
    batch_norm,
    batched,
    contraction,
    convolution,
    counting,
    dropout,
    embedding,
    embedding_bag,
    extremes,
    filling,
    indexing,
    likelihood,
    loss,
    masked,
    moments,
    normalization,
    ordered,
    pointwise,
    rearranging,
    reduction,
    reshape,
    scattering,
    slice_writes,
    slicing,
    softmax,
    stacking,
    strided,
    together,
    views,
)
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated, result_specs

__all__ = [
    "CUSTOM",
    "Compute",
    "OpCall",
    "Propagation",
    "Rule",
    "Signature",
    "all_replicated",
    "find_rule",
    "has_own_rule",
    "result_specs",
]

_RULES: dict[str, Rule] = {
    **attention.RULES,
    **batch_norm.RULES,
    **batched.RULES,
    **contraction.RULES,
    **convolution.RULES,
    **counting.RULES,
    **dropout.RULES,
    **embedding.RULES,
    **embedding_bag.RULES,
    **extremes.RULES,
    **filling.RULES,
    **indexing.RULES,
    **likelihood.RULES,
    **loss.RULES,
    **masked.RULES,
    **moments.RULES,
    **normalization.RULES,
    **ordered.RULES,
    **pointwise.RULES,
    **rearranging.RULES,
    **reduction.RULES,
    **reshape.RULES,
    **scattering.RULES,
    **slice_writes.RULES,
    **slicing.RULES,
    **softmax.RULES,
    **stacking.RULES,
    **strided.RULES,
    **together.RULES,
    **views.RULES,
}
"""By the operator's name, with its overload where overloads differ; in-place forms share the rule of the others."""

CUSTOM: dict[OpOverload, Rule] = {}
"""The rules that users register, for one overload each; a registry, as torch's own of operators is."""


def find_rule(call: OpCall) -> Rule | None:
    """The rule of the family that the call's operator belongs to; None when it has none."""
    if call.op in CUSTOM:
        return CUSTOM[call.op]
    name = call.facts.name
    rule = _RULES.get(str(call.op)) or _RULES.get(name) or (_RULES.get(name[:-1]) if call.facts.is_inplace else None)
    if rule is None and call.facts.is_pointwise:
        return pointwise.POINTWISE
    return rule


def has_own_rule(facts: OpFacts) -> bool:
    """True where a rule knows this very operator, and not only its family."""
    return facts.name in _RULES
