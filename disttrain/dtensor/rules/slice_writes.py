"""Operators that write a slice into a copy of a tensor: select_scatter, slice_scatter, diagonal_scatter.

Along a dim that is cut, each rank writes what falls into its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated
from disttrain.dtensor.rules.indexing import named_dim
from disttrain.dtensor.rules.parts import cutting_axes, kept, operand_part, partials_of
from disttrain.dtensor.spec.placement import Partial, Replicate, Shard
from disttrain.pieces import piece_size

_WHOLE = Replicate()


def written(call: OpCall) -> Sequence[Signature]:
    """Both cut along a dim they share; both partial; the operand cut along the dim that is sliced."""
    signatures = [all_replicated(call)]
    if None in call.operands:
        return signatures
    kinds = dict.fromkeys([*partials_of(call, 0), *partials_of(call, 1)])
    signatures += [Signature.of((kind, kind), kind) for kind in kinds if type(kind) is Partial]
    num_dims = len(call.output_shape)
    if call.facts.name == "aten.diagonal_scatter":
        gone = {int(call.argument("dim1", 0)) % num_dims, int(call.argument("dim2", 1)) % num_dims}
    else:
        gone = {named_dim(call)}
    removed = set() if call.facts.name == "aten.slice_scatter" else gone
    for dim in range(num_dims):
        if dim not in gone:
            signatures.append(Signature.of((Shard(dim), Shard(kept(dim, removed))), Shard(dim)))
        elif len(gone) == 1:
            signatures.append(Signature.of((Shard(dim), _WHOLE), Shard(dim)))
    return signatures


def localize(call: OpCall, propagation: Propagation) -> Compute:
    if None in call.operands or call.facts.name == "aten.diagonal_scatter":
        return call.op
    part = operand_part(call, propagation, 0)
    dim = named_dim(call)
    if not cutting_axes(part.layout, {dim}):
        return call.op
    size, begin = part.local_shape[dim], part.local_offset[dim]
    if call.facts.name == "aten.select_scatter":
        local_index = int(call.argument("index")) % part.shape[dim] - begin

        def select_scatter(local: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return local.select_scatter(source, dim, local_index) if 0 <= local_index < size else local.clone()

        return select_scatter
    start, stop, step = slice(call.argument("start"), call.argument("end"), call.argument("step", 1)).indices(
        part.shape[dim]
    )
    # The first and one past the last entry of the slice that fall into this part.
    num_entries = max(0, piece_size(stop - start, step))
    first = min(max(0, piece_size(begin - start, step)), num_entries)
    last = min(max(0, piece_size(begin + size - start, step)), num_entries)
    local_start = start + first * step - begin
    local_stop = local_start + (last - first - 1) * step + 1

    def slice_scatter(local: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if first >= last:
            return local.clone()
        values = source.narrow(dim, first, last - first)
        return local.slice_scatter(values, dim, local_start, local_stop, step)

    return slice_scatter


_RULE = Rule(written, localize, takes_blocks=False)

RULES = dict.fromkeys(("aten.diagonal_scatter", "aten.select_scatter", "aten.slice_scatter"), _RULE)
