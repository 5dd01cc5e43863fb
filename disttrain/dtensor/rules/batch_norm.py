"""Batch norm of a cut batch: statistics are over the whole of it, and every rank updates the same running ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from disttrain.dtensor.rules.axis_map import (
    BATCH_LETTERS,
    UNCUT,
    AxisMap,
    guarded,
    local_spec,
    signatures_of,
)
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule
from disttrain.dtensor.rules.parts import summed
from disttrain.dtensor.spec.layout import Spec

_ALWAYS_TRAINING = ("aten._batch_norm_with_update",)
_NEVER_TRAINING = ("aten._native_batch_norm_legit_no_training",)
_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")


def batch_norm(call: OpCall) -> AxisMap:
    """Any dim may be cut. The statistics come out whole: the ranks put them together on the way."""
    letters = _letters(call)
    is_training = _is_training(call)
    operands = {"input": letters} | dict.fromkeys(_PER_CHANNEL, "c")
    num_others = len(call.outputs) - 3
    statistics = "c" if is_training else UNCUT
    nothing = frozenset[str]()
    return AxisMap(
        operands,
        (letters, statistics, statistics, *[UNCUT] * num_others),
        letters,
        sources=(frozenset({"input"}), nothing, nothing, *[nothing] * num_others),
    )


def batch_norm_backward(call: OpCall) -> AxisMap:
    """Training: the input's gradient needs sums over the batch, which are the gradients of weight and bias. Else these
    are left as terms."""
    letters = _letters(call)
    operands = {"input": letters, "grad_out": letters, "grad_output": letters} | dict.fromkeys(_PER_CHANNEL, "c")
    summed = frozenset[str]() if _is_training(call) else frozenset({"input"})
    return AxisMap(operands, (letters, "c", "c"), letters, sources=(frozenset({"input"}), summed, summed))


def _letters(call: OpCall) -> str:
    num_dims = len(call.output_shape) if call.outputs[0].numel() else len(call.operand.shape)
    return "bc" + BATCH_LETTERS[: num_dims - 2]


def _is_training(call: OpCall) -> bool:
    if call.facts.name in _ALWAYS_TRAINING or "cudnn_batch_norm_backward" in call.facts.name:
        return True
    if call.facts.name in _NEVER_TRAINING:
        return False
    return bool(call.argument("train" if "train" in call.facts.arguments else "training", True))


@dataclass(frozen=True)
class _Batch:
    """The input's spec, and over which mesh axes sums of a part's elements have to be added up."""

    spec: Spec
    axes: tuple[int, ...]

    @classmethod
    def of(cls, call: OpCall, propagation: Propagation) -> _Batch:
        spec = local_spec(call, propagation, "input")
        assert spec is not None
        return cls(
            spec, tuple(axis for axis, placement in enumerate(spec.placements) if placement.cut_dim not in (None, 1))
        )

    @property
    def dims(self) -> list[int]:
        """All but the channels'."""
        return [0, *range(2, len(self.spec.shape))]

    @property
    def num_elements(self) -> int:
        """Of each channel."""
        return math.prod(self.spec.shape[dim] for dim in self.dims)

    def summed(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """A row of sums, one per channel, for each of `values`, over the whole batch. Collective."""
        rows = torch.stack([value.sum(self.dims) for value in values])
        return summed(rows, self.spec.mesh, self.axes)

    def spread(self, row: torch.Tensor) -> torch.Tensor:
        """One value per channel, to be broadcast."""
        return row.view(1, -1, *[1] * (len(self.spec.shape) - 2))


def _outputs(call: OpCall) -> tuple[torch.Tensor, ...]:
    """A CPU saves no statistics that it has not computed, and others in the dtype of what it is given, where torch's
    kernel for shapes says fp32."""
    if call.operand.mesh.device_type != "cpu":
        return call.outputs
    output, mean, invstd, *others = call.outputs
    if not _is_training(call):
        return output, mean.new_empty(0), invstd.new_empty(0), *others
    vectors = [call.argument(name) for name in ("weight", "bias", "running_mean", "running_var")]
    dtype = next((tensor.dtype for tensor in vectors if tensor is not None), output.dtype)
    return output, mean.to(dtype), invstd.to(dtype), *others


def _forward(call: OpCall, propagation: Propagation) -> Compute:
    batch = _Batch.of(call, propagation)
    if not batch.axes or not _is_training(call):
        return guarded(call, propagation, call.op)
    dtype = call.outputs[1].dtype
    num_others = len(call.outputs) - 3

    def run(*args: Any, **keywords: Any) -> Any:
        by_name = dict(zip(call.facts.arguments, args, strict=False)) | keywords
        values = by_name["input"].to(torch.promote_types(dtype, torch.float32))
        mean = batch.summed([values])[0] / batch.num_elements
        values = values - batch.spread(mean)
        squares = batch.summed([values * values])[0]
        epsilon = by_name["eps"] if "eps" in by_name else by_name["epsilon"]
        invstd = (squares / batch.num_elements + epsilon).rsqrt()
        if by_name.get("running_mean") is not None:
            momentum = by_name.get("momentum", by_name.get("exponential_average_factor"))
            by_name["running_mean"].lerp_(mean.to(by_name["running_mean"].dtype), momentum)
            unbiased = squares / (batch.num_elements - 1)
            by_name["running_var"].lerp_(unbiased.to(by_name["running_var"].dtype), momentum)
        values = values * batch.spread(invstd)
        if by_name["weight"] is not None:
            values = values * batch.spread(by_name["weight"])
        if by_name["bias"] is not None:
            values = values + batch.spread(by_name["bias"])
        others = [by_name["input"].new_empty(0, dtype=torch.uint8)] * num_others
        return values.to(by_name["input"].dtype), mean.to(dtype), invstd.to(dtype), *others

    return run


def _backward(call: OpCall, propagation: Propagation) -> Compute:
    batch = _Batch.of(call, propagation)
    # cuDNN keeps what its own forward left in a buffer, which a cut batch has not.
    if not _is_training(call) or not (batch.axes or "cudnn" in call.facts.name):
        return guarded(call, propagation, call.op)

    def run(*args: Any, **keywords: Any) -> Any:
        by_name = dict(zip(call.facts.arguments, args, strict=False)) | keywords
        grad = by_name["grad_out"] if "grad_out" in by_name else by_name["grad_output"]
        mean, weight = by_name["save_mean"], by_name["weight"]
        invstd = by_name["save_invstd"] if "save_invstd" in by_name else by_name["save_var"]
        dtype = torch.promote_types(mean.dtype, torch.float32)
        values = (by_name["input"].to(dtype) - batch.spread(mean)) * batch.spread(invstd)
        grad_bias, grad_weight = batch.summed([grad.to(dtype), grad * values])
        mean_terms = batch.spread(grad_bias) + values * batch.spread(grad_weight)
        grad_input = (grad - mean_terms / batch.num_elements) * batch.spread(invstd)
        if weight is not None:
            grad_input = grad_input * batch.spread(weight)
            grad_weight, grad_bias = grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
        mask = by_name.get("output_mask", (True, True, True))
        results = (grad_input.to(by_name["input"].dtype), grad_weight, grad_bias)
        return tuple(result if is_asked_for else None for result, is_asked_for in zip(results, mask, strict=True))

    return run


_FORWARD = Rule(signatures_of(batch_norm), _forward, outputs=_outputs)
_BACKWARD = Rule(signatures_of(batch_norm_backward), _backward)

RULES = {
    **{
        f"aten.{name}": _FORWARD
        for name in (
            "_batch_norm_with_update",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_no_training",
            "cudnn_batch_norm",
            "miopen_batch_norm",
            "native_batch_norm",
        )
    },
    **{f"aten.{name}_backward": _BACKWARD for name in ("cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm")},
}
