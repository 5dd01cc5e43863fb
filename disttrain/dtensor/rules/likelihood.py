"""The negative log likelihood of classes: batch, space or classes may be cut; a rank skips targets it doesn't hold."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.dtensor._torch import is_traced
from disttrain.dtensor.rules.axis_map import AxisMap, guarded, local_spec, operand_called, signatures_of
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule
from disttrain.dtensor.rules.loss import MEAN, NONE
from disttrain.dtensor.rules.parts import summed
from disttrain.dtensor.spec.layout import Spec

_SUM = 2
_SKIPPED = -100
"""The value in a part's targets for those that it skips."""


def likelihood(call: OpCall) -> AxisMap | None:
    """Letters: b batch, c classes, x and y space."""
    scores = operand_called(call, "self")
    if scores is None:
        return None
    letters = "c" if len(scores.shape) == 1 else "bcxy"[: len(scores.shape)]
    target = letters.replace("c", "")
    reduction = call.argument("reduction")
    reduced = target if reduction == NONE else ""
    operands = {"self": letters, "target": target, "weight": "c", "grad_output": reduced}
    if call.facts.name.endswith("_backward"):
        return AxisMap(operands, (letters,), letters, linear=(frozenset({"grad_output"}),))
    # A mean is over the weights of all targets, which all ranks have to know: they reduce it at once.
    everything = frozenset(operands) if reduction != MEAN else frozenset[str]()
    # Of a single target, torch sums the weights whatever the reduction.
    is_total_known = reduction == _SUM or (reduction == NONE and letters == "c")
    total = everything if is_total_known else frozenset[str]()
    return AxisMap(operands, (reduced, ""), letters, sources=(everything, total))


def _forward(call: OpCall, propagation: Propagation) -> Compute:
    scores, classes_dim = _scores(call, propagation)
    own_terms = _own_targets(call, propagation)
    axes = [axis for axis, placement in enumerate(scores.placements) if placement.cut_dim is not None]
    if not axes:
        return call.op
    if call.argument("reduction") != MEAN:
        return guarded(call, propagation, own_terms)
    num_others = scores.shape[classes_dim] - scores.local_shape[classes_dim]
    own_sum = guarded(call, propagation, own_terms)

    def mean(part: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int) -> Any:
        num_classes = part.shape[classes_dim] + num_others
        is_wrong = ((target < 0) | (target >= num_classes)) & (target != ignored)
        total, total_weight = own_sum(part, target.masked_fill(is_wrong, ignored), weight, _SUM, ignored)
        terms = torch.stack([total, total_weight, is_wrong.sum().to(total.dtype)])
        sums = summed(terms, scores.mesh, axes)
        # One rank's wrong target is everyone's error: none may wait for the others.
        problem = f"a target is out of bounds: there are {num_classes} classes"
        if is_traced():
            torch.ops.aten._assert_async.msg(sums[2] == 0, problem)
        elif sums.device.type == "cpu" and sums[2] > 0:
            raise IndexError(problem)
        return sums[0] / sums[1], sums[1]

    return mean


def _backward(call: OpCall, propagation: Propagation) -> Compute:
    return guarded(call, propagation, _own_targets(call, propagation))


def _own_targets(call: OpCall, propagation: Propagation) -> Compute:
    """The operator on targets counted from this rank's first class, where it skips those of other ranks."""
    scores, classes_dim = _scores(call, propagation)
    num_classes, num_own = scores.shape[classes_dim], scores.local_shape[classes_dim]
    first = scores.local_offset[classes_dim]
    if num_own == num_classes:
        return call.op
    target_place = call.facts.arguments.index("target")
    ignored_place = call.facts.arguments.index("ignore_index")

    def run(*args: Any) -> Any:
        target, ignored = args[target_place], args[ignored_place]
        local_target = target - first
        is_skipped = (local_target < 0) | (local_target >= num_own) | (target == ignored)
        shifted = list(args)
        shifted[target_place] = local_target.masked_fill(is_skipped, _SKIPPED)
        shifted[ignored_place] = _SKIPPED
        return call.op(*shifted)

    return run


def _scores(call: OpCall, propagation: Propagation) -> tuple[Spec, int]:
    spec = local_spec(call, propagation, "self")
    assert spec is not None
    return spec, min(1, len(spec.shape) - 1)


def _has_all_classes(call: OpCall) -> bool:
    """True where no axis cuts the classes: a part of the targets then counts them as the whole does."""
    scores = operand_called(call, "self")
    assert scores is not None
    return all(placement.cut_dim != min(1, scores.ndim - 1) for placement in scores.placements)


_FORWARD = Rule(
    signatures_of(likelihood), _forward, takes_blocks=False, goes_by_layout=True, computes_by_layout=_has_all_classes
)
_BACKWARD = Rule(signatures_of(likelihood), _backward, takes_blocks=False, goes_by_layout=True)

RULES = {
    "aten.nll_loss2d_backward": _BACKWARD,
    "aten.nll_loss2d_forward": _FORWARD,
    "aten.nll_loss_backward": _BACKWARD,
    "aten.nll_loss_forward": _FORWARD,
}
