"""Views in new sizes: the layout is known from a call of the same form, and a formula or torch gives the shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from disttrain.dtensor._torch import OpOverload, binding_of, off_the_record
from disttrain.dtensor.dispatch.call_plan import Run, Wrap, simple, viewing
from disttrain.dtensor.dispatch.sizes.size_forms import EXPAND, REGROUPING, resolved
from disttrain.dtensor.dispatch.sizes.view_formulas import views_of
from disttrain.dtensor.rules import Compute, OpCall, Propagation, Rule
from disttrain.dtensor.rules.dim_maps import with_argument
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.shard_sizes import contiguous_strides


class SizedView(NamedTuple):
    """The plan of a view for operands and arguments of one form, whatever their sizes."""

    call: OpCall
    """One such call."""
    layout: Layout
    compute: Compute | None
    """What computes the view of a part, if that goes by layout."""

    def bound(self, wrap: Wrap, leader: Spec, args: Sequence[Any]) -> Run:
        """The closure for a call with an operand of spec `leader`."""
        call = self.call
        specs = self._results(leader, args)
        compute = self.compute or _compute(call, specs)
        if call.op is _UNSAFE_VIEW:
            return simple(wrap, compute, 1, len(args), {}, specs[0])
        return viewing(wrap, call, compute, None, specs)

    def _results(self, leader: Spec, args: Sequence[Any]) -> list[Spec]:
        op = self.call.op
        if op in REGROUPING:
            shape = resolved(leader.shape, args[1])
            assert shape is not None  # else there is no form
            return [Spec.interned(self.layout, shape, contiguous_strides(shape), leader.dtype)]
        views = views_of(op, leader.shape, leader.stride, args[1:])
        if views is not None:
            return [Spec.interned(self.layout, shape, stride, leader.dtype) for shape, stride in views]
        with off_the_record():
            viewed = op(torch.empty_strided(leader.shape, leader.stride, dtype=leader.dtype, device="meta"), *args[1:])
        results = viewed if isinstance(viewed, list | tuple) else [viewed]
        return [Spec.interned(self.layout, tuple(each.shape), tuple(each.stride()), each.dtype) for each in results]


def sized_view(call: OpCall, rule: Rule, propagation: Propagation) -> SizedView | None:
    """The plan for all sizes of a view of an operand that does not move; None where its layout depends on sizes."""
    if not (call.facts.is_view or call.op is _UNSAFE_VIEW) or call.keywords or not call.outputs:
        return None
    if call.op not in REGROUPING | {EXPAND} and not (_is_of_parts(rule) or _is_along_uncut(call)):
        return None
    is_usual = call.operand.form is not None and call.operand.form[2]
    if call.op in REGROUPING and not is_usual:
        return None
    compute = rule.localize(call, propagation) if rule.localize is not None and rule.computes_by_layout else None
    return SizedView(call, propagation.results[0], compute)


def _is_of_parts(rule: Rule) -> bool:
    """True where a rank's part of the view is the view of its part, whatever the sizes."""
    return (rule.localize is None or rule.computes_by_layout) and rule.joint is None and rule.fetch is None


def _is_along_uncut(call: OpCall) -> bool:
    """True for a view of places of one dim, or of one that is dropped, if that dim is whole on every rank."""
    name = call.facts.name.removeprefix("aten.")
    if name not in _ALONG or not call.operand.shape:
        return False
    dim = call.argument("dim", 0) % len(call.operand.shape)
    return all(placement.cut_dim != dim for placement in call.operand.placements)


def _compute(call: OpCall, specs: Sequence[Spec]) -> Compute:
    """The view of a part whose results have these specs."""
    if call.op is EXPAND:
        return with_argument(call, "size", specs[0].local_shape)
    if call.op not in REGROUPING:
        return binding_of(call.op)
    shape = specs[0].local_shape
    if call.op is _UNSAFE_VIEW:
        return lambda part, *_: part.reshape(shape)
    return lambda part, *_: part.view(shape)


_UNSAFE_VIEW: Final[OpOverload] = torch.ops.aten._unsafe_view.default
_ALONG: Final = frozenset({"select", "slice", "split", "split_with_sizes"})
