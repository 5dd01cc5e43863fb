"""Tables of rows: batch, features or vocabulary may be cut; a rank skips the rows that it doesn't hold."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.dtensor.rules.axis_map import (
    AxisMap,
    batch_letters,
    guarded,
    local_spec,
    operand_called,
    signatures_of,
    zeros_where_empty,
)
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule


def embedding(call: OpCall) -> AxisMap:
    """Letters: v vocabulary, d features. Where v is cut, one rank has the row that is looked up, the others zeros."""
    letters = _letters(call)
    return AxisMap(
        {"weight": "vd", "indices": letters},
        (letters + "d",),
        letters + "dv",
        linear=(frozenset({"weight"}),),
    )


def embedding_backward(call: OpCall) -> AxisMap:
    """The gradient of a row is the sum over the places that look it up; a part cannot count all of these."""
    letters = _letters(call)
    cut = "d" if call.argument("scale_grad_by_freq", False) else letters + "d"
    return AxisMap(
        {"grad_output": letters + "d", "indices": letters}, ("vd",), cut, linear=(frozenset({"grad_output"}),)
    )


def _letters(call: OpCall) -> str:
    spec = operand_called(call, "indices")
    return "" if spec is None else batch_letters(len(spec.shape), 0)


def _look_up(call: OpCall, propagation: Propagation) -> Compute:
    spec = local_spec(call, propagation, "weight")
    assert spec is not None
    num_rows, num_own_rows, first = spec.shape[0], spec.local_shape[0], spec.local_offset[0]
    if num_own_rows == num_rows:
        return guarded(call, propagation, call.op)

    def run(weight: torch.Tensor, indices: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
        # Every rank of the vocabulary sees these indices, so all raise or none does.
        if indices.device.type == "cpu" and indices.numel() and not 0 <= indices.min() <= indices.max() < num_rows:
            raise IndexError(f"index out of range: the table has {num_rows} rows")
        local_indices = indices - first
        is_absent = (local_indices < 0) | (local_indices >= num_own_rows)
        rows: torch.Tensor = call.op(weight, local_indices.masked_fill(is_absent, 0), *rest, **keywords)
        return rows.masked_fill(is_absent.unsqueeze(-1), 0)

    return guarded(call, propagation, run)


RULES = {
    "aten.embedding": Rule(signatures_of(embedding), _look_up, takes_blocks=False, goes_by_layout=True),
    "aten.embedding_dense_backward": Rule(signatures_of(embedding_backward), zeros_where_empty, goes_by_layout=True),
}
