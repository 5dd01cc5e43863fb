"""Operators of which every element of the result needs all of the operands': whole operands are what they need."""

from __future__ import annotations

from disttrain.dtensor.rules.base import Rule, all_replicated

_NAMES = ("aten.median.default", "aten.nanmedian.default")

RULES = dict.fromkeys(_NAMES, Rule(lambda call: [all_replicated(call)]))
