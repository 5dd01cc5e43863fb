"""Views in new sizes: the layout is known from a call of the same form, and a formula or torch gives the shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from disttrain.dtensor._torch import OpOverload, binding_of, off_the_record
from disttrain.dtensor.dispatch.call_plan import Run, Wrap, simple, viewing
from disttrain.dtensor.dispatch.sizes.size_forms import EXPAND, REGROUPING, resolved
from disttrain.dtensor.rules import Compute, OpCall, Propagation, Rule
from disttrain.dtensor.rules.dim_maps import with_argument
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.shard_sizes import contiguous_strides


class SizedView(NamedTuple):
    """The plan of a view for operands and arguments of one form, whatever their sizes."""

    call: OpCall
    """One such call."""
    layout: Layout

    def bound(self, wrap: Wrap, leader: Spec, args: Sequence[Any]) -> Run:
        """The closure for a call with an operand of spec `leader`."""
        call = self.call
        spec = self._result(leader, args)
        compute = _compute(call, spec)
        if call.op is _UNSAFE_VIEW:
            return simple(wrap, compute, 1, len(args), {}, spec)
        return viewing(wrap, call, compute, None, [spec])

    def _result(self, leader: Spec, args: Sequence[Any]) -> Spec:
        op = self.call.op
        if op in REGROUPING:
            shape = resolved(leader.shape, args[1])
            assert shape is not None  # else there is no form
            return Spec.interned(self.layout, shape, contiguous_strides(shape), leader.dtype)
        with off_the_record():
            viewed = op(torch.empty_strided(leader.shape, leader.stride, dtype=leader.dtype, device="meta"), *args[1:])
        return Spec.interned(self.layout, tuple(viewed.shape), tuple(viewed.stride()), viewed.dtype)


def sized_view(call: OpCall, rule: Rule, propagation: Propagation) -> SizedView | None:
    """The plan for all sizes of a view of an operand that does not move; None where its layout depends on sizes."""
    if not (call.facts.is_view or call.op is _UNSAFE_VIEW) or call.keywords or rule.fetch is not None:
        return None
    if call.op not in REGROUPING | {EXPAND} and (rule.localize is not None or rule.joint is not None):
        return None
    is_usual = call.operand.form is not None and call.operand.form[2]
    return SizedView(call, propagation.results[0]) if is_usual or call.op not in REGROUPING else None


def _compute(call: OpCall, spec: Spec) -> Compute:
    """The view of a part whose result has this spec."""
    if call.op is EXPAND:
        return with_argument(call, "size", spec.local_shape)
    if call.op not in REGROUPING:
        return binding_of(call.op)
    shape = spec.local_shape
    if call.op is _UNSAFE_VIEW:
        return lambda part, *_: part.reshape(shape)
    return lambda part, *_: part.view(shape)


_UNSAFE_VIEW: Final[OpOverload] = torch.ops.aten._unsafe_view.default
