"""histc and trace: each rank counts, or adds up, what its part has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated
from disttrain.dtensor.rules.parts import cutting_axes, largest, operand_part, partials_of
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Partial, Shard

_SUM = Partial("sum")


def histogram(call: OpCall) -> Sequence[Signature]:
    """Any dim may be cut."""
    cuts = [Signature.of((Shard(dim),), _SUM) for dim in range(len(call.operand.shape))]
    return [all_replicated(call), *cuts]


def localize_histogram(call: OpCall, propagation: Propagation) -> Compute:
    """Counts in bins over one range: where none is given, that of all elements, on which the ranks agree first."""
    part = operand_part(call, propagation, 0)
    axes = cutting_axes(part.layout, range(len(part.shape)))
    if not axes or 0 in part.shape:
        return call.op

    def compute(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        by_name = {"bins": 100, "min": 0, "max": 0} | dict(zip(call.facts.arguments[1:], args, strict=False)) | kwargs
        low, high = by_name["min"], by_name["max"]
        if low == high:
            low, high = _range(local, part, axes)
        counts: torch.Tensor = call.op(local, by_name["bins"], low, high)
        return counts

    return compute


def _range(local: torch.Tensor, part: Spec, axes: Sequence[int]) -> tuple[float, float]:
    """The least and the largest element of the whole; not-a-number where there is one, or an infinity."""
    if local.numel():
        least, most = local.to(torch.float64).aminmax()
        is_finite = (least.isfinite() & most.isfinite()).to(torch.float64)
        ends = torch.stack([-least, most, 1 - is_finite]).nan_to_num_()
    else:
        lowest = torch.finfo(torch.float64).min
        ends = torch.tensor([lowest, lowest, 0], dtype=torch.float64, device=local.device)
    least_negated, most_found, is_endless = largest(ends, part.mesh, axes).tolist()
    return (float("nan"), float("nan")) if is_endless else (-least_negated, most_found)


def trace(call: OpCall) -> Sequence[Signature]:
    signatures = [all_replicated(call), *(Signature.of((Shard(dim),), _SUM) for dim in (0, 1))]
    kinds = [kind for kind in partials_of(call, 0) if kind.reduce_op in ("sum", "avg")]
    return signatures + [Signature.of((kind,), kind) for kind in kinds if call.operand.dtype != torch.bool]


def localize_trace(call: OpCall, propagation: Propagation) -> Compute:
    """The diagonal, counted from where this rank's rows and columns begin."""
    part = operand_part(call, propagation, 0)
    if not cutting_axes(part.layout, (0, 1)):
        return call.op
    rows, columns = part.local_offset
    dtype = call.outputs[0].dtype

    def compute(local: torch.Tensor) -> torch.Tensor:
        if not -local.shape[0] <= rows - columns <= local.shape[1]:
            return local.new_zeros((), dtype=dtype)
        return local.diagonal(rows - columns).sum(dtype=dtype)

    return compute


RULES = {
    "aten.histc": Rule(histogram, localize_histogram),
    "aten.trace": Rule(trace, localize_trace, takes_blocks=False),
}
