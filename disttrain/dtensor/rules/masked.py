"""masked_scatter: the elements that a mask shows come from a row of others, one after the other.

Cut along the first dim, a rank's elements follow those of the ranks before it: counts tell where in the row it begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated
from disttrain.dtensor.rules.parts import cutting_axes, gathered, operand_part, result_part
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Partial, Placement, Replicate, Shard

_WHOLE = Replicate()


def masked_scatter(call: OpCall) -> Sequence[Signature]:
    """The first dim may be cut; the row of elements is whole."""
    shape = call.output_shape
    if None in call.operands or not shape:
        return [all_replicated(call)]
    first, mask = _along_first(call.operand, shape), _along_first(call.operands[1], shape)
    return [all_replicated(call), Signature.of((first, mask, _WHOLE), Shard(0))]


def _along_first(spec: Spec | None, shape: Sequence[int]) -> Placement:
    """The placement of an operand that cuts the first dim of the shape it is broadcast to."""
    is_cut = spec is not None and len(spec.shape) == len(shape) and spec.shape[0] == shape[0]
    return Shard(0) if is_cut else _WHOLE


def localize_masked_scatter(call: OpCall, propagation: Propagation) -> Compute:
    part = result_part(call, propagation)
    axes = cutting_axes(part.layout, {0})
    if not axes:
        return call.op

    def compute(local: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        first, total = _counted(mask.expand(part.local_shape), part, axes)
        if total > source.numel():
            # torch asks on a CPU only, and would ask on some of the ranks.
            raise RuntimeError(
                f"masked_scatter: the mask shows {total} elements, and there are {source.numel()} to take"
            )
        written: torch.Tensor = call.op(local, mask, source.reshape(-1)[first:])
        return written

    return compute


def masked_scatter_backward(call: OpCall) -> Sequence[Signature]:
    """Each rank has the elements that its mask shows, at their positions in the row; the others add nothing."""
    gradient = call.operand
    if None in call.operands or not gradient.shape:
        return [all_replicated(call)]
    mask = _along_first(call.operands[1], gradient.shape)
    linear = Signature.of((Partial("sum"), _WHOLE), Partial("sum"))
    return [all_replicated(call), Signature.of((Shard(0), mask), Partial("sum")), linear]


def localize_masked_scatter_backward(call: OpCall, propagation: Propagation) -> Compute:
    part = operand_part(call, propagation, 0)
    axes = cutting_axes(part.layout, {0})
    if not axes:
        return call.op

    def compute(gradient: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        shown = gradient.masked_select(mask)
        first, _ = _counted(mask.expand(part.local_shape), part, axes)
        row = gradient.new_zeros(tuple(sizes))
        row.view(-1)[first : first + shown.numel()] = shown
        return row

    return compute


def _counted(mask: torch.Tensor, part: Spec, axes: Sequence[int]) -> tuple[int, int]:
    """The numbers of elements that the masks of the ranks before this one show, and that all masks do. Collective."""
    total, before = mask.sum(), torch.zeros((), dtype=torch.int64, device=mask.device)
    for axis in reversed(axes):
        counts = gathered(total, part.mesh, axis)
        before = before + counts[: part.mesh.get_local_rank(axis)].sum()
        total = counts.sum()
    first, whole = torch.stack([before, total]).tolist()
    return first, whole


RULES = {
    "aten.masked_scatter": Rule(masked_scatter, localize_masked_scatter, takes_blocks=False),
    "aten.masked_scatter_backward": Rule(masked_scatter_backward, localize_masked_scatter_backward, takes_blocks=False),
}
