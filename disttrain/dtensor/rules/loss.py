"""Losses that compare element with element, or row with row: a cut leaves each rank a term of the reduced loss.

The mean is the sum over all ranks divided by the global count: a rank's mean counts by the share of the elements that
it holds, so parts may be uneven, and empty.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from disttrain.dtensor.rules.axis_map import (
    BATCH_LETTERS,
    UNCUT,
    AxisMap,
    aligned_letters,
    guarded,
    local_spec,
    operand_names,
    signatures_of,
)
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, broadcast_shape

NONE, MEAN = 0, 1
"""torch's numbers for reductions; the sum is 2."""

_BACKWARD = "_backward"

_BY_ELEMENT = (
    "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_with_logits",
    "aten.huber_loss",
    "aten.mse_loss",
    "aten.smooth_l1_loss",
    "aten.soft_margin_loss",
)
_BY_ROW = ("aten.multi_margin_loss", "aten.multilabel_margin_loss")


def by_element(call: OpCall) -> AxisMap:
    """Operands are broadcast to one shape, any dim of which may be cut."""
    shape = broadcast_shape(*[spec.shape for spec in call.operands if spec is not None])
    letters = BATCH_LETTERS[: len(shape)]
    operands = {
        name: aligned_letters(letters, () if spec is None else spec.shape, shape)
        for name, spec in zip(operand_names(call), call.operands, strict=True)
    }
    if call.facts.name.endswith(_BACKWARD):
        return AxisMap(operands, (letters,), letters, linear=(frozenset({"grad_output"}),))
    return AxisMap(operands, (letters if _reduction(call) == NONE else "",), letters)


def by_row(call: OpCall) -> AxisMap | None:
    """Rows of scores, one per element of the batch, which stay whole."""
    names = operand_names(call)
    scores = call.operands[names.index("self")]
    if scores is None or len(scores.shape) < 2:
        return None
    rows = "A" + UNCUT
    reduced = "A" if _reduction(call) == NONE else ""
    target = "A" if call.facts.name.startswith("aten.multi_margin_loss") else rows
    operands = {"self": rows, "target": target, "is_target": rows, "grad_output": reduced}
    if call.facts.name.endswith(_BACKWARD):
        return AxisMap(operands, (rows,), "A", linear=(frozenset({"grad_output"}),))
    return AxisMap(operands, (reduced, rows)[: len(call.outputs)], "A")


def _reduction(call: OpCall) -> int:
    return int(call.argument("reduction", MEAN))


def _shared(call: OpCall, propagation: Propagation) -> Compute:
    """A mean counts by this rank's share of the elements; in backward, so does the gradient of the mean."""
    specs = [local_spec(call, propagation, name) for name in operand_names(call) if name != "weight"]
    counted = [spec for spec in specs if spec is not None]
    if call.facts.name.startswith(_BY_ROW):
        counted = [spec for spec in counted if len(spec.shape) == 2]
    num_elements = math.prod(broadcast_shape(*[spec.shape for spec in counted]))
    num_own = math.prod(broadcast_shape(*[spec.local_shape for spec in counted]))
    if _reduction(call) != MEAN or num_own == num_elements:
        return guarded(call, propagation, call.op)
    share = num_own / num_elements

    def forward(*args: Any, **keywords: Any) -> Any:
        results = call.op(*args, **keywords)
        return (results[0] * share, *results[1:]) if isinstance(results, tuple) else results * share

    def backward(grad: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        return call.op(grad * share, *rest, **keywords)

    return guarded(call, propagation, backward if call.facts.name.endswith(_BACKWARD) else forward)


_ELEMENTS = Rule(signatures_of(by_element), _shared)
_ROWS = Rule(signatures_of(by_row), _shared)

RULES = {
    **{name + ending: _ELEMENTS for name in _BY_ELEMENT for ending in ("", _BACKWARD)},
    **{name + ending: _ROWS for name in _BY_ROW for ending in ("", "_forward", _BACKWARD)},
}
