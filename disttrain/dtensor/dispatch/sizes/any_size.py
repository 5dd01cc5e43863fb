"""Plans that hold for every size, so that a new sequence length needs no new plan.

If nothing moves and all cuts are even, a rule's choice depends only on which sizes are one. The result then has the
sizes of this rank's part, except in cut dims: each of these is as large as the operand's dim that is cut along the same
axes. Views are planned by `sized_views.py`. Where operands move, it holds for operands of one shape, or else the choice
is kept, and is bound to each size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from disttrain.dtensor._torch import binding_of
from disttrain.dtensor.dispatch.sizes.sized_views import SizedView, sized_view
from disttrain.dtensor.redistribute.many import Move, Moves
from disttrain.dtensor.rules import Compute, OpCall, Propagation, Rule
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.shard_sizes import contiguous_strides

Source = tuple[int, int, int]
"""A dim of the result that is cut, the argument that has a dim of its size, and that dim."""


class RuleChoice(NamedTuple):
    """The rule of a call and the layouts that it chose, where operands move, for calls of one form.

    It holds where operands have one shape and one dtype: then each move costs the same share, whatever the size.
    """

    rule: Rule
    propagation: Propagation


class AnySizePlan(NamedTuple):
    """Computes results from operands of one form, where each rank's parts of them are the operator of its parts."""

    compute: Compute
    positions: tuple[int, ...]
    """Of the operands among the arguments."""
    layouts: tuple[Layout, ...]
    sources: tuple[tuple[Source, ...], ...]
    is_tuple: bool
    moves: tuple[tuple[int, Layout], ...] = ()
    """Operands that are redistributed first, by position; all operands have one shape and one dtype then."""

    def moving(self, args: Sequence[Any]) -> list[Move] | None:
        """The moves of operands of these sizes; None where something else may be chosen for them."""
        if not self.moves:
            return []
        specs = [args[position]._spec for position in self.positions]
        if not are_equal(specs) or not all(specs[0].with_layout(layout).is_even for _, layout in self.moves):
            return None
        return [(position, args[position]._spec, layout) for position, layout in self.moves]

    def parts_and_specs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], moves: Sequence[Move]
    ) -> tuple[Any, list[Spec | None] | None]:
        """This rank's parts of the results, as the operator returns them, and the results' specs, None for one that is
        no tensor; None where the parts' strides don't tell them."""
        local_args = [*args]
        for position in self.positions:
            local_args[position] = args[position]._local_tensor
        if moves:
            Moves(moves).run(local_args)
        parts = self.compute(*local_args, **kwargs)
        specs: list[Spec | None] = []
        for part, layout, sources in zip(parts if self.is_tuple else (parts,), self.layouts, self.sources, strict=True):
            if not isinstance(part, torch.Tensor):
                specs.append(None)
                continue
            if not part.is_contiguous():
                return parts, None
            shape = [*part.shape]
            for dim, position, operand_dim in sources:
                shape[dim] = args[position]._spec.shape[operand_dim]
            specs.append(Spec.interned(layout, tuple(shape), contiguous_strides(shape), part.dtype))
        return parts, specs


def moves_operands(call: OpCall, propagation: Propagation) -> bool:
    """Whether an operand is redistributed before the operator runs."""
    return any(
        spec is None or spec.layout is not layout
        for spec, layout in zip(call.operands, propagation.operands, strict=True)
    )


def are_equal(specs: Sequence[Spec | None]) -> bool:
    """Whether operands, DTensors all, have one shape and one dtype."""
    return len({None if spec is None else (spec.shape, spec.dtype) for spec in specs} - {None}) == 1


def any_size_plan(call: OpCall, rule: Rule, propagation: Propagation) -> AnySizePlan | SizedView | RuleChoice | None:
    """The plan for all sizes of a call, or else the choice; None when its result depends on sizes in other ways."""
    if rule.reads_numbers or call.facts.mutated or call.facts.returns_list or None in call.operands:
        return None
    if not moves_operands(call, propagation):
        return sized_view(call, rule, propagation) or _without_sizes(call, rule, propagation)
    is_plain = rule.localize is None and rule.joint is None and rule.fetch is None and not call.facts.is_view
    may_choose = is_plain and rule.shards_unevenly and are_equal(call.operands)
    return (_without_sizes(call, rule, propagation) or RuleChoice(rule, propagation)) if may_choose else None


def _without_sizes(call: OpCall, rule: Rule, propagation: Propagation) -> AnySizePlan | None:
    if call.facts.is_view:
        return None
    compute = binding_of(call.op)
    if rule.localize is not None:
        local = rule.localize(call, propagation) if rule.goes_by_layout else None
        if local is not call.op and not (local is not None and rule.computes_by_layout):
            return None
        compute = compute if local is call.op else local
    positions = tuple([index for index, value in enumerate(call.arguments) if isinstance(value, torch.Tensor)])
    if len(positions) != len(call.operands) or not all(output.is_contiguous() for output in call.outputs):
        return None
    moves = []
    for position, spec, moved in zip(positions, call.operands, propagation.operands, strict=True):
        if spec is not None and moved is not None and spec.layout is not moved:
            moves.append((position, moved))
    sources = []
    is_wanted = call.argument("output_mask", (True,) * len(call.outputs))
    for output, layout, is_made in zip(call.outputs, propagation.results, is_wanted, strict=True):
        source = _sources(call, positions, propagation.operands, layout, tuple(output.shape)) if is_made else ()
        if source is None:
            return None
        sources.append(source)
    is_tuple = len(call.facts.returned) > 1
    if not sources:
        return None
    return AnySizePlan(compute, positions, propagation.results, tuple(sources), is_tuple, tuple(moves))


def _sources(
    call: OpCall,
    positions: Sequence[int],
    layouts: Sequence[Layout | None],
    result: Layout,
    shape: tuple[int, ...],
) -> tuple[Source, ...] | None:
    """Of each dim that `result` cuts, where its size can be read; None where that is in no operand."""
    sources: dict[int, Source] = {}
    for axis, placement in enumerate(result.placements):
        dim = placement.cut_dim
        if dim is None:
            continue
        for position, spec, layout in zip(positions, call.operands, layouts, strict=True):
            assert spec is not None
            assert layout is not None
            operand_dim = layout.placements[axis].cut_dim
            if operand_dim is not None and spec.shape[operand_dim] == shape[dim]:
                sources[dim] = (dim, position, operand_dim)
                break
        else:
            return None
    return tuple(sources.values())
