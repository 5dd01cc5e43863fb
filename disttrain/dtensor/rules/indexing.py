"""Operators that read elements at given places: gather, index_select, take, and advanced indexing.

A dim that is looked into may be cut, too: each rank brings what it has, and zero for what others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated, broadcast_shape
from disttrain.dtensor.rules.parts import cutting_axes, operand_part, owned, partials_of, result_part
from disttrain.dtensor.spec.placement import Partial, Placement, Replicate, Shard

_SUM, _WHOLE = Partial("sum"), Replicate()


@dataclass(frozen=True)
class IndexMap:
    """The dims of an indexed result: `indexed` dims of the operand make way for the indices' common `shape`.

    `start` is where that begins in the result, and `kept` gives the position there of each dim that is not indexed.
    """

    indexed: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    kept: dict[int, int]

    def along(self, index_shape: Sequence[int], dim: int) -> Placement:
        """The placement of an index that cuts dim `dim` of the common shape; broadcast along it, it is whole."""
        index_dim = dim - (len(self.shape) - len(index_shape))
        return _WHOLE if index_dim < 0 or index_shape[index_dim] != self.shape[dim] else Shard(index_dim)


def index_map(num_dims: int, indices: Sequence[torch.Tensor | None]) -> IndexMap:
    indexed = tuple(dim for dim, index in enumerate(indices) if index is not None)
    shape = broadcast_shape(*[index.shape for index in indices if index is not None])
    is_together = indexed == tuple(range(indexed[0], indexed[0] + len(indexed)))
    start = indexed[0] if is_together else 0
    others = [dim for dim in range(num_dims) if dim not in indexed]
    kept = {dim: position if position < start else position + len(shape) for position, dim in enumerate(others)}
    return IndexMap(indexed, shape, start, kept)


def are_places(indices: Sequence[torch.Tensor | None]) -> bool:
    """False for masks, whose number of places depends on values."""
    present = [index for index in indices if index is not None]
    return bool(present) and all(index.dtype not in (torch.bool, torch.uint8) for index in present)


def can_be_summed(call: OpCall) -> bool:
    """Truth values have no sum."""
    return call.operand.dtype != torch.bool


def named_dim(call: OpCall) -> int:
    return int(call.argument("dim", 0)) % max(1, len(call.operand.shape))


def index(call: OpCall) -> Sequence[Signature]:
    indices = call.argument("indices")
    signatures = [all_replicated(call)]
    if call.operands[0] is None or not are_places(indices):
        return signatures
    where = index_map(len(call.operand.shape), indices)
    whole = [_WHOLE] * (len(call.operands) - 1)
    signatures += [Signature.of((kind, *whole), kind) for kind in partials_of(call, 0)]
    signatures += [Signature.of((Shard(dim), *whole), Shard(position)) for dim, position in where.kept.items()]
    shapes = [index.shape for index in indices if index is not None]
    signatures += [
        Signature.of((_WHOLE, *(where.along(shape, dim) for shape in shapes)), Shard(where.start + dim))
        for dim in range(len(where.shape))
    ]
    if can_be_summed(call):
        signatures += [Signature.of((Shard(dim), *whole), _SUM) for dim in where.indexed]
    return signatures


def localize_index(call: OpCall, propagation: Propagation) -> Compute:
    if call.operands[0] is None or not are_places(call.argument("indices")):
        return call.op
    part = operand_part(call, propagation, 0)
    where = index_map(len(part.shape), call.argument("indices"))
    cut_dims = [dim for dim in where.indexed if cutting_axes(part.layout, {dim})]
    if not cut_dims:
        return call.op
    result = result_part(call, propagation)
    num_after = len(result.shape) - where.start - len(where.shape)

    def compute(local: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any, **__: Any) -> torch.Tensor:
        if not all(local.shape[dim] for dim in cut_dims):
            return local.new_zeros(result.local_shape)
        local_indices = list(indices)
        masks = []
        for dim in cut_dims:
            index = local_indices[dim]
            assert index is not None
            local_indices[dim], is_here = owned(index, part, dim)
            masks.append(is_here)
        mask = reduce(and_, masks)
        values: torch.Tensor = call.op(local, local_indices)
        return values.masked_fill_(~mask.reshape(*mask.shape, *[1] * num_after), 0)

    return compute


def gather(call: OpCall) -> Sequence[Signature]:
    signatures = [all_replicated(call)]
    source, index = call.operands[0], call.operands[1]
    if source is None or index is None or len(source.shape) != len(index.shape):
        return signatures
    dim = named_dim(call)
    signatures += [Signature.of((kind, _WHOLE), kind) for kind in partials_of(call, 0)]
    for other in range(len(source.shape)):
        if other == dim:
            signatures.append(Signature.of((_WHOLE, Shard(dim)), Shard(dim)))
        elif source.shape[other] == index.shape[other]:
            signatures.append(Signature.of((Shard(other), Shard(other)), Shard(other)))
    if can_be_summed(call) and source.shape:
        signatures.append(Signature.of((Shard(dim), _WHOLE), _SUM))
    return signatures


def index_select(call: OpCall) -> Sequence[Signature]:
    signatures = [all_replicated(call)]
    dim, index = named_dim(call), call.operands[1]
    if call.operands[0] is None:
        return signatures
    signatures += [Signature.of((kind, _WHOLE), kind) for kind in partials_of(call, 0)]
    if index is not None and index.shape and call.operand.shape:
        signatures.append(Signature.of((_WHOLE, Shard(0)), Shard(dim)))
    for other in range(len(call.operand.shape)):
        if other != dim:
            signatures.append(Signature.of((Shard(other), _WHOLE), Shard(other)))
        elif can_be_summed(call):
            signatures.append(Signature.of((Shard(dim), _WHOLE), _SUM))
    return signatures


def localize_along(call: OpCall, propagation: Propagation) -> Compute:
    """Of gather and index_select, where the dim that is looked into is cut."""
    if call.operands[0] is None:
        return call.op
    part = operand_part(call, propagation, 0)
    dim = named_dim(call)
    if not cutting_axes(part.layout, {dim}):
        return call.op
    result = result_part(call, propagation)
    is_gather = call.facts.name == "aten.gather"

    def compute(local: torch.Tensor, _: int, index: torch.Tensor, **__: Any) -> torch.Tensor:
        if local.shape[dim] == 0:
            return local.new_zeros(result.local_shape)
        local_index, is_here = owned(index, part, dim)
        values: torch.Tensor = call.op(local, dim, local_index)
        if not is_gather:
            is_here = is_here.reshape(-1, *[1] * (local.ndim - dim - 1))
        return values.masked_fill_(~is_here, 0)

    return compute


def take(call: OpCall) -> Sequence[Signature]:
    """Places count through the flattened whole: it is not cut."""
    signatures = [all_replicated(call), *(Signature.of((kind, _WHOLE), kind) for kind in partials_of(call, 0))]
    return signatures + [Signature.of((_WHOLE, Shard(dim)), Shard(dim)) for dim in range(len(call.output_shape))]


RULES: dict[str, Rule] = {
    "aten._unsafe_index": Rule(index, localize_index, takes_blocks=False),
    "aten.gather": Rule(gather, localize_along, takes_blocks=False),
    "aten.index": Rule(index, localize_index, takes_blocks=False),
    "aten.index_select": Rule(index_select, localize_along, takes_blocks=False),
    "aten.take": Rule(take),
}
