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
from disttrain.dtensor.dispatch.call_plan import Run, Wrap, leads_with_tensors, of_list, placed, simple, wrapped
from disttrain.dtensor.dispatch.sizes.sized_views import SizedView, sized_view
from disttrain.dtensor.redistribute.many import Move, Moves
from disttrain.dtensor.rules import Compute, OpCall, Propagation, Rule
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.shard_sizes import is_permuted, strides_in_order

Source = tuple[int, int, int]
"""A dim of the result that is cut, the operand that has a dim of its size, and that dim."""


class RuleChoice(NamedTuple):
    """The rule of a call and the layouts that it chose, where operands move, for calls of one form.

    It holds where operands have one shape and one dtype: then each move costs the same share, whatever the size.
    """

    rule: Rule
    propagation: Propagation


class AnySizePlan(NamedTuple):
    """Computes results from operands of one form, where each rank's parts of them are the operator of its parts."""

    compute: Compute
    positions: tuple[int, ...] | None
    """Of the operands among the arguments; None where they are the list that comes first."""
    layouts: tuple[Layout, ...]
    sources: tuple[tuple[Source, ...], ...]
    alike: tuple[int | None, ...]
    """Of each result, an operand that lies as it does, and has its dtype: where their parts have one shape, the wholes
    have one spec."""
    twins: tuple[int | None, ...]
    """Of each result, an earlier one of that layout and dtype whose sizes are read in the same place."""
    is_tuple: bool
    leads: bool
    """True where the operands are the first arguments, none of them moves, and one tensor comes out."""
    moves: tuple[tuple[int, Layout], ...] = ()
    """Operands that are redistributed first; all have one shape and one dtype then."""
    numbers: list[float | complex] | None = None
    """For calls with these numbers; None where they don't matter."""

    def run(
        self, wrap: Wrap, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Run, Any, Sequence[Spec | None]] | None:
        """How to run calls of these sizes, the results of this one, and their specs; None where it is to be planned."""
        positions, compute = self.positions, self.compute
        if self.leads and positions is not None:
            return self._run_leading(wrap, args, kwargs, len(positions))
        operands = args[0] if positions is None else [args[position] for position in positions]
        moves = self._moving(operands) if self.moves else []
        if moves is None:
            return None
        local_args = [*args]
        if positions is None:
            local_args[0] = [tensor._local_tensor for tensor in operands]
        else:
            for position in positions:
                local_args[position] = args[position]._local_tensor
        if moves:
            Moves(moves).run(local_args)
        parts = compute(*local_args, **kwargs)
        specs = self._specs(parts if self.is_tuple else (parts,), operands)
        if specs is None:
            return None
        if positions is None:
            assert specs[0] is not None
            run = of_list(wrap, compute, specs[0])
        else:
            run = placed(wrap, compute, positions, specs, moves)
        return run, wrapped(wrap, parts, specs), specs

    def _run_leading(
        self, wrap: Wrap, args: tuple[Any, ...], kwargs: dict[str, Any], num_operands: int
    ) -> tuple[Run, Any, Sequence[Spec | None]] | None:
        compute = self.compute
        parts = [tensor._local_tensor for tensor in args[:num_operands]]
        part = compute(*parts, *args[num_operands:], **kwargs)
        spec = self._spec(0, part, args)
        if spec is None:
            return None
        return simple(wrap, compute, num_operands, len(args), kwargs, spec), wrap(part, spec), (spec,)

    def _specs(self, parts: Sequence[Any], operands: Sequence[Any]) -> list[Spec | None] | None:
        """The specs of the results, None for what is no tensor; None where the strides of a part don't tell."""
        specs: list[Spec | None] = []
        for index, part in enumerate(parts):
            spec = None
            if isinstance(part, torch.Tensor):
                twin = self.twins[index]
                is_twin = twin is not None and _are_twins(parts[twin], part)
                spec = specs[twin] if is_twin and twin is not None else self._spec(index, part, operands)
                if spec is None:
                    return None
            specs.append(spec)
        return specs

    def _moving(self, operands: Sequence[Any]) -> list[Move] | None:
        """The moves of operands of these sizes; None where something else may be chosen for them."""
        specs = [tensor._spec for tensor in operands]
        if not are_equal(specs) or not all(specs[0].with_layout(layout).is_even for _, layout in self.moves):
            return None
        assert self.positions is not None
        return [(self.positions[index], specs[index], layout) for index, layout in self.moves]

    def _spec(self, index: int, part: torch.Tensor, operands: Sequence[Any]) -> Spec | None:
        """The spec of a result; None where the part's strides don't tell the whole's."""
        is_contiguous, part_shape = part.is_contiguous(), part.shape
        alike = self.alike[index]
        if is_contiguous and alike is not None and part_shape == operands[alike]._local_tensor.shape:
            spec: Spec = operands[alike]._spec
            if part.dtype is spec.dtype:
                return spec
        shape = [*part_shape]
        for dim, operand, operand_dim in self.sources[index]:
            shape[dim] = operands[operand]._spec.shape[operand_dim]
        if is_contiguous:
            return Spec.even(self.layouts[index], tuple(shape), tuple(part_shape), part.dtype)
        if not _shows_order(part):
            return None
        return Spec.interned(self.layouts[index], tuple(shape), strides_in_order(shape, part.stride()), part.dtype)


def _are_twins(first: Any, second: torch.Tensor) -> bool:
    return (
        isinstance(first, torch.Tensor)
        and first.shape == second.shape
        and first.is_contiguous()
        and second.is_contiguous()
    )


def _shows_order(tensor: torch.Tensor) -> bool:
    """True for a tensor that is contiguous but for the order of its dims, which its strides tell."""
    return min(tensor.shape, default=0) > 1 and is_permuted(tensor.shape, tensor.stride())


def numbers_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float | complex]:
    """The arguments of which a key has the type alone."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, float | complex)]


def moves_operands(call: OpCall, propagation: Propagation) -> bool:
    """Whether an operand is redistributed before the operator runs."""
    return any(
        spec is None or spec.layout is not layout
        for spec, layout in zip(call.operands, propagation.operands, strict=True)
    )


def are_equal(specs: Sequence[Spec | None]) -> bool:
    """Whether operands, DTensors all, have one shape and one dtype."""
    return len({None if spec is None else (spec.shape, spec.dtype) for spec in specs} - {None}) == 1


AnySize = AnySizePlan | SizedView | RuleChoice | Run
"""What is kept for calls of one form; a closure, where the one of the first call holds for all."""


def any_size_plan(call: OpCall, rule: Rule, propagation: Propagation, run: Run) -> AnySize | None:
    """The plan for all sizes of a call that `run` runs, or else the choice; None when its result depends on sizes in
    other ways."""
    if call.facts.returns_list > call.facts.is_view or None in call.operands:
        return None
    if rule.depends_on_numbers(call.operands) and not rule.goes_by_layout:
        return None
    if call.facts.mutated:
        return run if _writes_parts(call, rule, propagation) else None
    if not moves_operands(call, propagation):
        return sized_view(call, rule, propagation) or _without_sizes(call, rule, propagation)
    is_plain = rule.localize is None and rule.joint is None and rule.fetch is None and not call.facts.is_view
    may_choose = is_plain and rule.shards_unevenly and are_equal(call.operands)
    return (_without_sizes(call, rule, propagation) or RuleChoice(rule, propagation)) if may_choose else None


def _writes_parts(call: OpCall, rule: Rule, propagation: Propagation) -> bool:
    """True where the operator writes to a floating operand in place, on each rank to its part."""
    is_in_place = call.facts.is_inplace and call.facts.returned == (0,) and not call.facts.changes_shape
    is_floating = call.operand.dtype.is_floating_point or call.operand.dtype.is_complex
    if not (is_in_place and is_floating and leads_with_tensors(call)) or moves_operands(call, propagation):
        return False
    if rule.localize is not None and not (rule.goes_by_layout and rule.localize(call, propagation) is call.op):
        return False
    return rule.joint is None and propagation.results[0] is call.operand.layout


def _without_sizes(call: OpCall, rule: Rule, propagation: Propagation) -> AnySizePlan | None:
    if call.facts.is_view:
        return None
    compute = binding_of(call.op)
    if rule.localize is not None:
        local = rule.localize(call, propagation) if rule.goes_by_layout else None
        if local is not call.op and not (local is not None and rule.computes_by_layout(call)):
            return None
        compute = compute if local is call.op else local
    positions = _positions(call)
    if positions is not None and len(positions) != len(call.operands):
        return None
    if not call.outputs or not all(output.is_contiguous() or _shows_order(output) for output in call.outputs):
        return None
    moves = [
        (index, moved)
        for index, (spec, moved) in enumerate(zip(call.operands, propagation.operands, strict=True))
        if spec is not None and moved is not None and spec.layout is not moved
    ]
    if moves and positions is None:
        return None
    sources = []
    is_wanted = call.argument("output_mask", (True,) * len(call.outputs))
    for output, layout, is_made in zip(call.outputs, propagation.results, is_wanted, strict=True):
        source = _sources(call, propagation.operands, layout, tuple(output.shape)) if is_made else ()
        if source is None:
            return None
        sources.append(source)
    alike = [
        _alike(call, layout, output.dtype) for layout, output in zip(propagation.results, call.outputs, strict=True)
    ]
    looks = [
        (layout, output.dtype, source)
        for layout, output, source in zip(propagation.results, call.outputs, sources, strict=True)
    ]
    twins = [looks.index(look) if looks.index(look) < index else None for index, look in enumerate(looks)]
    numbers = numbers_of(call.arguments, call.keywords) if rule.depends_on_numbers(call.operands) else None
    is_tuple = len(call.facts.returned) > 1
    leads = not moves and not is_tuple and leads_with_tensors(call)
    return AnySizePlan(
        compute,
        positions,
        propagation.results,
        tuple(sources),
        tuple(alike),
        tuple(twins),
        is_tuple,
        leads,
        tuple(moves),
        numbers,
    )


def _positions(call: OpCall) -> tuple[int, ...] | None:
    """Of the operands among the arguments; None where they are the list that comes first, and nothing else is one."""
    first = call.arguments[0]
    if type(first) is list and len(first) == len(call.operands) and len(call.facts.returned) == 1:
        return None
    return tuple([index for index, value in enumerate(call.arguments) if isinstance(value, torch.Tensor)])


def _alike(call: OpCall, layout: Layout, dtype: torch.dtype) -> int | None:
    """The first operand that is contiguous, as results are, and has this layout and dtype."""
    for index, spec in enumerate(call.operands):
        if (
            spec is not None
            and spec.layout is layout
            and spec.dtype is dtype
            and spec.form is not None
            and spec.form.is_contiguous
        ):
            return index
    return None


def _sources(
    call: OpCall, layouts: Sequence[Layout | None], result: Layout, shape: tuple[int, ...]
) -> tuple[Source, ...] | None:
    """Of each dim that `result` cuts, where its size can be read; None where that is in no operand."""
    sources: dict[int, Source] = {}
    for axis, placement in enumerate(result.placements):
        dim = placement.cut_dim
        if dim is None:
            continue
        for index, (spec, layout) in enumerate(zip(call.operands, layouts, strict=True)):
            assert spec is not None
            assert layout is not None
            operand_dim = layout.placements[axis].cut_dim
            if operand_dim is not None and spec.shape[operand_dim] == shape[dim]:
                sources[dim] = (dim, index, operand_dim)
                break
        else:
            return None
    return tuple(sources.values())
