"""Plans that hold for every size, so that a new sequence length needs no new plan.

If nothing moves and all cuts are even, a rule's choice depends only on which sizes are one. The result then has the
sizes of this rank's part, except in cut dims: each of these is as large as the operand's dim that is cut along the same
axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from disttrain.dtensor._torch import binding_of
from disttrain.dtensor.dispatch.call_plan import leads_with_tensors
from disttrain.dtensor.rules import Compute, OpCall, Propagation, Rule
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.shard_sizes import contiguous_strides

Source = tuple[int, int] | None
"""The operand and the dim of it whose size a cut dim of the result has; None: the dim is not cut."""


class AnySizePlan(NamedTuple):
    """Computes one result from operands of one form, where each rank's part of it is the operator of its parts."""

    compute: Compute
    num_operands: int
    layout: Layout
    sources: tuple[Source, ...]

    def part_and_spec(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, Spec | None]:
        """This rank's part of the result, and the result's spec; None where the part's strides don't tell it."""
        operands = args[: self.num_operands]
        part = self.compute(*[operand._local_tensor for operand in operands], *args[self.num_operands :], **kwargs)
        if not part.is_contiguous():
            return part, None
        shape = tuple(
            [
                size if source is None else operands[source[0]]._spec.shape[source[1]]
                for size, source in zip(part.shape, self.sources, strict=True)
            ]
        )
        return part, Spec.interned(self.layout, shape, contiguous_strides(shape), part.dtype)


def moves_operands(call: OpCall, propagation: Propagation) -> bool:
    """Whether an operand is redistributed before the operator runs."""
    return any(
        spec is None or spec.layout is not layout
        for spec, layout in zip(call.operands, propagation.operands, strict=True)
    )


def any_size_plan(call: OpCall, rule: Rule, propagation: Propagation) -> AnySizePlan | None:
    """The plan for all sizes of a call that nothing moves for; None when its result depends on sizes in other ways."""
    if moves_operands(call, propagation) or rule.reads_numbers or call.facts.mutated or call.facts.is_view:
        return None
    if rule.localize is not None and not (rule.goes_by_layout and rule.localize(call, propagation) is call.op):
        return None
    if len(call.outputs) != 1 or not leads_with_tensors(call):
        return None
    output, layout = call.outputs[0], propagation.results[0]
    sources = _sources(call, layout, tuple(output.shape))
    if sources is None or not output.is_contiguous():
        return None
    return AnySizePlan(binding_of(call.op), len(call.operands), layout, sources)


def _sources(call: OpCall, layout: Layout, shape: tuple[int, ...]) -> tuple[Source, ...] | None:
    sources: list[Source] = [None] * len(shape)
    for axis, placement in enumerate(layout.placements):
        dim = placement.cut_dim
        if dim is None:
            continue
        for position, spec in enumerate(call.operands):
            assert spec is not None
            operand_dim = spec.placements[axis].cut_dim
            if operand_dim is not None and spec.shape[operand_dim] == shape[dim]:
                sources[dim] = (position, operand_dim)
                break
        else:
            return None
    return tuple(sources)
