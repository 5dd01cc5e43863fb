"""Dropout as the single process would do it: every rank draws the whole mask, and keeps its part."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated, result_specs
from disttrain.dtensor.spec.placement import Partial, Shard


def dropout(call: OpCall) -> list[Signature]:
    """Any dim may be cut; a partial tensor keeps or loses the same elements on all ranks."""
    cuts = [Signature.of((Shard(dim),), Shard(dim), Shard(dim)) for dim in range(len(call.output_shape))]
    terms = [Signature.of((Partial("sum"),), Partial("sum"), all_replicated(call).results[1])]
    return [all_replicated(call), *cuts, *terms]


def dropout_backward(call: OpCall) -> list[Signature]:
    """The gradient where the mask is true."""
    cuts = [Signature.of((Shard(dim), Shard(dim)), Shard(dim)) for dim in range(len(call.output_shape))]
    terms = Signature.of((Partial("sum"), all_replicated(call).operands[1]), Partial("sum"))
    return [all_replicated(call), *cuts, terms]


def _masked(call: OpCall, propagation: Propagation) -> Compute:
    _, mask_spec = result_specs(call, propagation)
    is_drawn = call.argument("train", True)
    if mask_spec.layout.is_replicated or not is_drawn:
        return call.op
    whole_layout = mask_spec.layout.replicated()

    def run(part: torch.Tensor, probability: float, train: bool | None) -> Any:
        _, whole_mask = call.op(part.new_empty(mask_spec.shape), probability, train)
        mask = redistribute_local(whole_mask, mask_spec.with_layout(whole_layout), mask_spec.layout)
        scale = 0.0 if probability == 1 else 1 / (1 - probability)
        return part * mask * scale, mask

    return run


RULES = {
    "aten.native_dropout": Rule(dropout, _masked),
    "aten.native_dropout_backward": Rule(dropout_backward),
}
