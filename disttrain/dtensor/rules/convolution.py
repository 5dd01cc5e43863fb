"""Convolutions: the batch may be cut, and channels where there is one group of them. Space is never cut."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.dtensor.rules.axis_map import (
    AxisMap,
    guarded,
    local_spec,
    operand_called,
    signatures_of,
    with_arguments,
    zeros,
)
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, always, result_specs


def convolution(call: OpCall) -> AxisMap | None:
    """Letters: b batch, i channels in, o channels out."""
    weight = operand_called(call, "weight")
    if weight is None:
        return None
    space = "." * (len(weight.shape) - 2)
    letters = {
        "input": "bi" + space,
        "weight": ("io" if call.argument("transposed") else "oi") + space,
        "bias": "o",
        "grad_output": "bo" + space,
    }
    cut = "bio" if call.argument("groups") == 1 else "b"
    if call.facts.name == "aten.convolution_backward":
        sources = (
            frozenset({"grad_output", "weight"}),
            frozenset({"grad_output", "input"}),
            frozenset({"grad_output"}),
        )
        results = (letters["input"], letters["weight"], "o")
        return AxisMap(letters, results, cut, linear=(frozenset({"grad_output"}),), sources=sources)
    linear = (frozenset({"input", "bias"}), frozenset({"weight", "bias"}))
    return AxisMap(letters, (letters["grad_output"],), cut, frozenset({"bias"}), linear)


def _forward(call: OpCall, propagation: Propagation) -> Compute:
    (result,) = result_specs(call, propagation)
    if 0 in result.local_shape:
        # Which of torch's ways to compute takes sizes that leave nothing is a matter of the batch.
        return zeros(call, propagation)
    if not _lacks_channels_in(call, propagation) or operand_called(call, "bias") is None:
        return guarded(call, propagation, call.op)

    def biases_alone(part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        shape = (1, -1, *[1] * (len(result.shape) - 2))
        return bias.view(shape).expand(result.local_shape).clone(memory_format=torch.contiguous_format)

    return biases_alone


def _backward(call: OpCall, propagation: Propagation) -> Compute:
    grad = local_spec(call, propagation, "grad_output")
    assert grad is not None
    if 0 in grad.local_shape:
        return zeros(call, propagation)
    zeros_or = guarded(call, propagation, call.op)
    sizes = call.argument("bias_sizes")
    if not sizes:
        return zeros_or
    if _lacks_channels_in(call, propagation):

        def bias_gradient_alone(grad: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
            return *zeros_or(grad, *rest, **keywords)[:2], grad.sum([0, *range(2, grad.ndim)])

        return bias_gradient_alone
    return guarded(call, propagation, with_arguments(call, {"bias_sizes": [grad.local_shape[1]]}))


def _lacks_channels_in(call: OpCall, propagation: Propagation) -> bool:
    """True for a rank without a piece of the channels in: it has no share in the products, but may have one in what
    the bias adds."""
    input_spec = local_spec(call, propagation, "input")
    assert input_spec is not None
    return input_spec.local_shape[1] == 0 and 0 not in input_spec.shape


RULES = {
    "aten.convolution": Rule(signatures_of(convolution), _forward, goes_by_layout=True),
    "aten.convolution_backward": Rule(
        signatures_of(convolution), _backward, goes_by_layout=True, computes_by_layout=always
    ),
}
