"""Views, and gradients of views, in new sizes: the layout is known from a call of the same form, and a formula or torch
gives the shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from disttrain.dtensor._torch import OpOverload, binding_of, off_the_record
from disttrain.dtensor.dispatch.call_plan import Run, Wrap, simple, viewing
from disttrain.dtensor.dispatch.sizes.size_forms import EXPAND, GRADIENTS, REGROUPING, SIZED, resolved
from disttrain.dtensor.dispatch.sizes.view_formulas import views_of
from disttrain.dtensor.rules import Compute, OpCall, Propagation, Rule
from disttrain.dtensor.rules.dim_maps import with_argument
from disttrain.dtensor.spec.layout import Layout, Spec


class SizedView(NamedTuple):
    """The plan of a view for operands and arguments of one form, whatever their sizes."""

    call: OpCall
    """One such call."""
    layout: Layout
    compute: Compute | None
    """What computes the view of a part; None if it is told the part's size."""
    is_regrouping: bool
    is_same: bool
    """True for a view of all of a tensor, as it lies."""
    is_gradient: bool

    def bound(self, wrap: Wrap, leader: Spec, args: Sequence[Any]) -> Run:
        """The closure for a call with an operand of spec `leader`."""
        call = self.call
        specs = self._results(leader, args)
        compute = self.compute or _resizing(call, specs[0].local_shape)
        if not call.facts.is_view:
            return simple(wrap, compute, 1, len(args), {}, specs[0])
        return viewing(wrap, call, compute, None, specs)

    def _results(self, leader: Spec, args: Sequence[Any]) -> list[Spec]:
        if self.is_same:
            return [leader]
        if self.is_regrouping and leader.form is not None and leader.form.is_contiguous:
            shape = resolved(leader.shape, tuple(args[1]))
            assert shape is not None  # else there is no form
            return [Spec.even(self.layout, shape, self.layout.even_part(shape), leader.dtype)]
        if self.is_gradient:
            shape = tuple(args[1])
            return [Spec.even(self.layout, shape, self.layout.even_part(shape), leader.dtype)]
        op = self.call.op
        views = views_of(op, leader.shape, leader.stride, args[1:])
        if views is not None:
            return [Spec.interned(self.layout, shape, stride, leader.dtype) for shape, stride in views]
        with off_the_record():
            viewed = op(torch.empty_strided(leader.shape, leader.stride, dtype=leader.dtype, device="meta"), *args[1:])
        results = viewed if isinstance(viewed, list | tuple) else [viewed]
        return [Spec.interned(self.layout, tuple(each.shape), tuple(each.stride()), each.dtype) for each in results]


def sized_view(call: OpCall, rule: Rule, propagation: Propagation) -> SizedView | None:
    """The plan for all sizes of a view of an operand that does not move; None where its layout depends on sizes."""
    is_sized = call.op in SIZED
    if not (call.facts.is_view or is_sized) or call.keywords or not call.outputs:
        return None
    # What is reshaped is no view where its strides don't allow it.
    if call.op is _UNSAFE_VIEW and not call.operand.is_contiguous:
        return None
    if is_sized:
        return _sized(call, propagation, None)
    if rule.joint is not None or (rule.fetch is not None and rule.fetch(call, propagation) is not None):
        return None
    compute: Compute = binding_of(call.op)
    if rule.localize is not None:
        if not rule.computes_by_layout(call):
            return None
        local = rule.localize(call, propagation)
        compute = compute if local is call.op else local
    elif rule.fetch is not None:
        return None
    return _sized(call, propagation, compute)


def _sized(call: OpCall, propagation: Propagation, compute: Compute | None) -> SizedView:
    op = call.op
    return SizedView(call, propagation.results[0], compute, op in REGROUPING, op in _SAME, op in GRADIENTS)


def _resizing(call: OpCall, shape: tuple[int, ...]) -> Compute:
    """The view of a part that has this shape."""
    if call.op is EXPAND:
        return with_argument(call, "size", shape)
    if call.op in GRADIENTS:
        return with_argument(call, "input_sizes", shape)
    if call.op is _UNSAFE_VIEW:
        return lambda part, *_: part.reshape(shape)
    return lambda part, *_: part.view(shape)


_SAME: Final = frozenset({torch.ops.aten.alias.default, torch.ops.aten.detach.default})
"""Views of all of a tensor, as it lies."""
_UNSAFE_VIEW: Final[OpOverload] = torch.ops.aten._unsafe_view.default
