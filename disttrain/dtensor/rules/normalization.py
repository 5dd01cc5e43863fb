"""Norms over a tensor's last dims or its groups of channels: the other dims may be cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from disttrain.dtensor.rules.axis_map import (
    AxisMap,
    batch_letters,
    guarded,
    local_spec,
    signatures_of,
    with_arguments,
    zeros_where_empty,
)
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule


def layer_norm(call: OpCall) -> AxisMap:
    """Each row of the normalized dims by itself; the weight's gradient sums over rows."""
    letters = _rows(call)
    num_results = len(call.outputs)
    operands = dict.fromkeys(("input", "grad_out", "mean", "rstd"), letters)
    if call.facts.name.endswith("_backward"):
        # The gradients of weight and bias have the normalized dims alone.
        return AxisMap(operands, (letters, *[""] * (num_results - 1)), _cut(letters))
    return AxisMap(operands, (letters,) * num_results, _cut(letters))


def group_norm(call: OpCall) -> AxisMap:
    """Groups of channels of each element of the batch; only the batch may be cut."""
    letters = "A" + "." * (len(call.operand.shape) - 1)
    operands = dict.fromkeys(("input", "grad_out"), letters) | {"mean": "A.", "rstd": "A."}
    if call.facts.name.endswith("_backward"):
        return AxisMap(operands, (letters, "", ""), "A")
    return AxisMap(operands, (letters, "A.", "A."), "A")


def _rows(call: OpCall) -> str:
    # Of the input, or its gradient's; a gradient that nobody asked for is empty.
    return batch_letters(len(call.operand.shape), len(call.argument("normalized_shape")))


def _cut(letters: str) -> str:
    return letters.replace(".", "")


def _with_local_batch(call: OpCall, propagation: Propagation) -> Compute:
    if not _is_told_its_batch(call):
        spec = local_spec(call, propagation, "input")
        assert spec is not None
        return guarded(call, propagation, with_arguments(call, {"N": spec.local_shape[0]}))
    op, place = call.op, call.facts.arguments.index("N")

    def run(*args: Any) -> Any:
        return op(*args[:place], args[0].shape[0], *args[place + 1 :])

    return guarded(call, propagation, run)


def _is_told_its_batch(call: OpCall) -> bool:
    """Whether all arguments are given by position, as autograd does, so that a part's batch can take the whole's
    place."""
    return not call.keywords


def _outputs(call: OpCall) -> tuple[torch.Tensor, ...]:
    """On a CPU, statistics in the dtype of the weights, or else of the input; torch's kernel for shapes has another."""
    if call.operand.mesh.device_type != "cpu":
        return call.outputs
    output, *statistics = call.outputs
    vectors = [call.argument(name) for name in ("weight", "bias")]
    dtype = next((tensor.dtype for tensor in vectors if tensor is not None), output.dtype)
    return output, *[statistic.to(dtype) for statistic in statistics]


_LAYER_NORM = Rule(signatures_of(layer_norm), zeros_where_empty, goes_by_layout=True)
_GROUP_NORM = Rule(
    signatures_of(group_norm), _with_local_batch, goes_by_layout=True, computes_by_layout=_is_told_its_batch
)

RULES = {
    "aten._fused_rms_norm": _LAYER_NORM,
    "aten._fused_rms_norm_backward": _LAYER_NORM,
    "aten.native_group_norm": replace(_GROUP_NORM, outputs=_outputs),
    "aten.native_group_norm_backward": _GROUP_NORM,
    "aten.native_layer_norm": replace(_LAYER_NORM, outputs=_outputs),
    "aten.native_layer_norm_backward": _LAYER_NORM,
}
