"""Positions of the largest and the smallest elements: max and min with a dim, argmax, argmin.

Of a cut dim each rank finds its own; then the ranks compare values, and of equal ones the first in the whole wins, as
it does in a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated
from disttrain.dtensor.rules.parts import cutting_axes, gathered, highest, kept, lowest, operand_part
from disttrain.dtensor.rules.reduction import keeps_dims, reduced_dims
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Replicate, Shard
from disttrain.dtensor.spec.shard_sizes import contiguous_strides

_NOWHERE = torch.iinfo(torch.int64).max


def extreme(call: OpCall) -> Sequence[Signature]:
    """Any dim may be cut; along a reduced one the ranks agree on the result."""
    removed = reduced_dims(call)
    num_results = len(call.outputs)
    signatures = [all_replicated(call)]
    for dim in range(len(call.operand.shape)):
        if dim not in removed:
            placement = Shard(dim if keeps_dims(call) else kept(dim, removed))
            signatures.append(Signature.of((Shard(dim),), *[placement] * num_results))
        elif call.operand.dtype != torch.bool or call.facts.name in ("aten.max", "aten.min"):
            # argmax of truth values is an error: of all ranks, also those with an empty part.
            signatures.append(Signature.of((Shard(dim),), *[Replicate()] * num_results))
    return signatures


def localize(call: OpCall, propagation: Propagation) -> Compute:
    part = operand_part(call, propagation, 0)
    removed = sorted(reduced_dims(call))
    axes = cutting_axes(part.layout, removed)
    if not axes:
        return call.op
    is_max = call.facts.name in ("aten.max", "aten.argmax")
    keepdim = keeps_dims(call)

    def compute(local: torch.Tensor, *_: Any, **__: Any) -> Any:
        values, indices = _own(local, part, removed, is_max=is_max)
        for axis in reversed(axes):
            values, indices = _best(
                gathered(_comparable(values), part.mesh, axis), gathered(indices, part.mesh, axis), is_max=is_max
            )
        if not keepdim:
            values, indices = values.squeeze(removed), indices.squeeze(removed)
        return (values.to(local.dtype), indices) if len(call.outputs) == 2 else indices

    return compute


def _own(local: torch.Tensor, part: Spec, removed: list[int], *, is_max: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme of this rank's part, and where it is in the whole; reduced dims stay, with size 1."""
    shape = [1 if dim in removed else size for dim, size in enumerate(local.shape)]
    if any(local.shape[dim] == 0 for dim in removed):
        nothing = lowest(local.dtype) if is_max else highest(local.dtype)
        return local.new_full(shape, nothing), local.new_full(shape, _NOWHERE, dtype=torch.int64)
    if len(removed) == 1:
        dim = removed[0]
        values, indices = (torch.max if is_max else torch.min)(local, dim, keepdim=True)
        return values, indices + part.local_offset[dim]
    # Every dim is reduced, and places count through the flattened whole.
    values, index = (torch.max if is_max else torch.min)(local.reshape(-1), 0)
    steps = contiguous_strides(part.shape)
    where = torch.unravel_index(index, local.shape)
    total = sum(
        (local_index + offset) * step for local_index, offset, step in zip(where, part.local_offset, steps, strict=True)
    )
    assert isinstance(total, torch.Tensor)
    return values.reshape(shape), total.reshape(shape)


def _comparable(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.uint8) if values.dtype == torch.bool else values


def _best(values: torch.Tensor, indices: torch.Tensor, *, is_max: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the first dim: the extreme, where not-a-number counts as one, and the first place that has it."""
    best = values.amax(0) if is_max else values.amin(0)
    has_it = (values == best) | (values != values)
    return best, indices.masked_fill(~has_it, _NOWHERE).amin(0)


_RULE = Rule(extreme, localize, takes_blocks=False, goes_by_layout=True)

RULES = dict.fromkeys(("aten.argmax", "aten.argmin", "aten.max.dim", "aten.min.dim"), _RULE)
