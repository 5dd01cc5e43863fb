"""What DTensor's rules say of a call along one mesh axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

import disttrain
from disttrain.dtensor import Layout, Partial, Placement, Replicate, Shard, Spec
from disttrain.dtensor.dispatch import dispatch
from disttrain.dtensor.dispatch.call_plan import replaced
from disttrain.dtensor.dispatch.outputs.global_outputs import global_outputs
from disttrain.dtensor.rules import OpCall, Propagation, Rule, Signature, find_rule
from disttrain.dtensor.spec.placement import NormPartial
from tests.dtensor_ops.rules.calls import AtenCall

PARTIALS = (*map(Partial, ("sum", "avg", "min", "max", "product")), NormPartial())


def planned(call: AtenCall, mesh: disttrain.DeviceMesh, placements: Sequence[Placement]) -> tuple[OpCall, Rule] | None:
    """The call as rules see it when its operands lie by `placements`, and its rule; None where it has none."""
    facts = dispatch.facts(call.op)
    operands = call.operands
    args, kwargs = replaced(call.args, call.kwargs, [dispatch._meta(operand) for operand in operands])
    outputs = global_outputs(call.op, facts, args, kwargs, may_cache=True)
    if outputs is None:
        return None
    specs = tuple(
        Spec(Layout(mesh, [placement]), tuple(operand.shape), operand.stride(), operand.dtype)
        for operand, placement in zip(operands, placements, strict=True)
    )
    seen = OpCall(call.op, facts, tuple(args), kwargs, specs, outputs)
    rule = find_rule(seen)
    if rule is None:
        return None
    return (seen if rule.outputs is None else replace(seen, outputs=rule.outputs(seen))), rule


def offered(call: AtenCall, mesh: disttrain.DeviceMesh) -> list[Signature] | None:
    """All signatures, also those that are offered only where operands lie in some way; None without a rule."""
    found: dict[Signature, None] = {}
    for placements in _ways_to_lie(call.operands):
        plan = planned(call, mesh, placements)
        if plan is None:
            return None
        seen, rule = plan
        propagation = rule.joint(seen) if rule.joint is not None else None
        found.update(dict.fromkeys(rule.signatures(seen) if propagation is None else [_signature(propagation)]))
    return list(found)


def _ways_to_lie(operands: Sequence[torch.Tensor]) -> Iterator[list[Placement]]:
    """Operands all alike as far as they can be: more may be offered where all of them are partial, say."""
    yield [Replicate() for _ in operands]
    for dim in range(max(operand.ndim for operand in operands)):
        yield [Shard(dim) if dim < operand.ndim else Replicate() for operand in operands]
    for partial in PARTIALS:
        yield [partial for _ in operands]


def _signature(propagation: Propagation) -> Signature:
    operands = [Replicate() if layout is None else layout.placements[0] for layout in propagation.operands]
    return Signature.of(operands, *[layout.placements[0] for layout in propagation.results])
