"""Operators that compute each element from the elements at the same place, after broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from disttrain.dtensor.rules.base import OpCall, Rule, Signature, all_replicated
from disttrain.dtensor.rules.parts import partials_of
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import NormPartial, Partial, Placement, Replicate, Shard

_COPIES = (
    "aten._to_copy",
    "aten.clone",
    "aten.lift_fresh",
    "aten.positive",
)
"""The same values, perhaps in another type."""

_LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "aten.add": ((0, 1),),
    "aten.addcdiv": ((0, 1),),
    "aten.addcmul": ((0, 1), (0, 2)),
    "aten.conj_physical": ((0,),),
    "aten.copy": ((0, 1),),
    "aten.deg2rad": ((0,),),
    "aten.div": ((0,),),
    "aten.elu_backward": ((0,),),
    "aten.gelu_backward": ((0,),),
    "aten.hardshrink_backward": ((0,),),
    "aten.hardsigmoid_backward": ((0,),),
    "aten.hardswish_backward": ((0,),),
    "aten.hardtanh_backward": ((0,),),
    "aten.leaky_relu_backward": ((0,),),
    "aten.lerp": ((0, 1),),
    "aten.log_sigmoid_backward": ((0,),),
    "aten.logit_backward": ((0,),),
    "aten.mish_backward": ((0,),),
    "aten.mul": ((0,), (1,)),
    "aten.native_dropout_backward": ((0,),),
    "aten.neg": ((0,),),
    "aten.rad2deg": ((0,),),
    "aten.rsub": ((0, 1),),
    "aten.sigmoid_backward": ((0,),),
    "aten.silu_backward": ((0,),),
    "aten.softplus_backward": ((0,),),
    "aten.softshrink_backward": ((0,),),
    "aten.sub": ((0, 1),),
    "aten.tanh_backward": ((0,),),
    "aten.threshold_backward": ((0,),),
    "aten.where": ((1, 2),),
}
"""Operands in which an operator is linear together, the others being whole: f(sum of x) = sum of f(x)."""

_UNTAGGED = (
    "aten.__ilshift__",
    "aten.__irshift__",
    "aten.__lshift__",
    "aten.__rshift__",
    "aten._prelu_kernel",
    "aten._prelu_kernel_backward",
    "aten.abs",
    "aten.complex",
    "aten.copy",
    "aten.copysign",
    "aten.elu_backward",
    "aten.eq",
    "aten.floor_divide",
    "aten.gcd",
    "aten.ge",
    "aten.glu_jvp",
    "aten.gt",
    "aten.hardshrink_backward",
    "aten.hardsigmoid_backward",
    "aten.hardswish",
    "aten.hardswish_backward",
    "aten.hardtanh_backward",
    "aten.heaviside",
    "aten.lcm",
    "aten.le",
    "aten.leaky_relu_backward",
    "aten.log_sigmoid_backward",
    "aten.log_sigmoid_forward",
    "aten.lt",
    "aten.mish",
    "aten.mish_backward",
    "aten.ne",
    "aten.polar",
    "aten.rsub",
    "aten.softplus_backward",
    "aten.softshrink_backward",
    "aten.special_erfcx",
    "aten.special_i0e",
    "aten.special_ndtr",
    "aten.threshold",
)
"""Pointwise as well, though torch does not tag them so, or not their in-place forms."""

_WHERE_ZERO = "aten.masked_fill"


def pointwise(call: OpCall) -> Sequence[Signature]:
    """Any dim may be sharded, in all operands alike; an operand that is broadcast along it is whole."""
    shape = call.output_shape
    if any(tuple(output.shape) != shape for output in call.outputs):
        return [all_replicated(call)]
    sharded = [
        Signature.of([_operand(spec, dim, shape) for spec in call.operands], *[Shard(dim)] * len(call.outputs))
        for dim in range(len(shape))
    ]
    return [all_replicated(call), *sharded, *_partial(call)]


def _operand(spec: Spec | None, dim: int, output_shape: tuple[int, ...]) -> Placement:
    """The placement of an operand that shards the result along output dim `dim`."""
    if spec is None:
        return Replicate()
    own_dim = dim - (len(output_shape) - len(spec.shape))
    is_broadcast = own_dim < 0 or (spec.shape[own_dim] == 1 and output_shape[dim] != 1)
    return Replicate() if is_broadcast else Shard(own_dim)


def _partial(call: OpCall) -> list[Signature]:
    kinds = dict.fromkeys(kind for index in range(len(call.operands)) for kind in partials_of(call, index))
    if not kinds or len(call.outputs) > 1:
        return []
    name = call.facts.name.removesuffix("_") if call.facts.is_inplace else call.facts.name
    signatures = _mirrored(call, list(kinds)) if name == "aten.neg" else []
    if name in _COPIES:
        return [Signature.of((kind,), kind) for kind in kinds if _keeps_values(call, kind)]
    for group in _groups(call, name):
        signatures += [
            Signature.of([kind if index in group else Replicate() for index in range(len(call.operands))], kind)
            for kind in kinds
            if kind.reduce_op in ("sum", "avg")
        ]
    return signatures


def _groups(call: OpCall, name: str) -> tuple[tuple[int, ...], ...]:
    """Sets of operands that may be partial together."""
    if name == _WHERE_ZERO:
        value = call.argument("value")
        is_zero = not isinstance(value, torch.Tensor) and value == 0
        groups: tuple[tuple[int, ...], ...] = ((0,),) if is_zero else ()
    elif name == "aten.div" and call.argument("rounding_mode") is not None:
        groups = ()
    else:
        groups = _LINEAR.get(name, ())
    return tuple(group for group in groups if all(_may_be_summed(call, index) for index in group))


def _may_be_summed(call: OpCall, index: int) -> bool:
    """False for a number, which each rank would add, for truth values, and for a value that is rounded first."""
    spec = call.operands[index] if index < len(call.operands) else None
    if spec is None or spec.dtype == torch.bool:
        return False
    target = call.outputs[0].dtype
    return torch.promote_types(spec.dtype, target) == target


def _keeps_values(call: OpCall, kind: Partial) -> bool:
    """True where reducing may come after the copy: not where the copy's dtype rounds, or has no such reduction."""
    source, target = call.operand.dtype, call.outputs[0].dtype
    if source == target:
        return True
    if source == torch.bool or (target.is_complex and kind.reduce_op not in ("sum", "avg")):
        return False
    return torch.promote_types(source, target) == target


def _mirrored(call: OpCall, kinds: Sequence[Partial]) -> list[Signature]:
    """The largest of some numbers is the smallest of their negatives."""
    other = {"max": "min", "min": "max"}
    if not call.operand.dtype.is_floating_point:
        return []
    return [
        Signature.of((kind,), replace(kind, reduce_op=other[kind.reduce_op]))
        for kind in kinds
        if kind.reduce_op in other and not isinstance(kind, NormPartial)
    ]


POINTWISE = Rule(pointwise)

RULES: dict[str, Rule] = {
    **dict.fromkeys((*_COPIES, *_UNTAGGED), POINTWISE),
    _WHERE_ZERO: Rule(pointwise, reads_numbers_of_partial=True),
}
