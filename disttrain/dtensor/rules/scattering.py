"""Operators that write elements at given places: scatter, put, and index_add, _copy, _fill and _put.

Where the ranks hold different entries of what is written, and writing adds up, the result is partial: exactly one rank
then holds what was there before. Where the dim that is written into is cut, each rank writes what falls into its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated, broadcast_shape
from disttrain.dtensor.rules.indexing import IndexMap, are_places, can_be_summed, index_map, named_dim
from disttrain.dtensor.rules.parts import cutting_axes, operand_part, owned, partials_of
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Partial, Placement, Replicate, Shard

_SUM, _WHOLE = Partial("sum"), Replicate()
_KINDS = {"sum": _SUM, "prod": Partial("product"), "amax": Partial("max"), "amin": Partial("min")}


def scatter(call: OpCall) -> Sequence[Signature]:
    signatures = [all_replicated(call)]
    specs = [spec for spec in call.operands if spec is not None]
    if len(specs) < len(call.operands) or len({len(spec.shape) for spec in specs}) > 1:
        return signatures
    dim, num_operands = named_dim(call), len(specs)
    for other in range(len(call.output_shape)):
        if other == dim:
            signatures.append(Signature.of((Shard(dim), *[_WHOLE] * (num_operands - 1)), Shard(dim)))
        elif all(spec.shape[other] == specs[0].shape[other] for spec in specs):
            signatures.append(Signature.of((Shard(other),) * num_operands, Shard(other)))
    kind = _accumulated(call)
    if kind is not None and call.output_shape:
        signatures.append(Signature.of((kind, _WHOLE, kind), kind))
        if specs[1].shape[dim] == specs[2].shape[dim]:
            signatures.append(Signature.of((kind, Shard(dim), Shard(dim)), kind))
    elif call.facts.name.rstrip("_") == "aten.scatter" and call.argument("reduce") is None:
        if num_operands == 3:
            signatures += _copied(call)
        elif call.argument("value") == 0:
            signatures += [
                Signature.of((kind, _WHOLE), kind) for kind in partials_of(call, 0) if kind.reduce_op in ("sum", "avg")
            ]
    return signatures


def _accumulated(call: OpCall) -> Partial | None:
    """The reduction that puts together what is written to one place; None where it is not one over ranks."""
    name = call.facts.name.rstrip("_")
    if not can_be_summed(call):
        return None
    if name == "aten.scatter_add":
        return _SUM
    if name == "aten.scatter_reduce" and call.argument("include_self", True) and not call.operand.dtype.is_complex:
        return _KINDS.get(call.argument("reduce"))
    return None


def _copied(call: OpCall) -> list[Signature]:
    """Values put in place of others, both partial: every element comes from one of the two."""
    kinds = dict.fromkeys([*partials_of(call, 0), *partials_of(call, len(call.operands) - 1)])
    whole = [_WHOLE] * (len(call.operands) - 2)
    return [Signature.of((kind, *whole, kind), kind) for kind in kinds if type(kind) is Partial]


def localize_scatter(call: OpCall, propagation: Propagation) -> Compute:
    """Entries that belong to others go to a row of their own, which is cut off again."""
    part = _written_part(call, propagation)
    dim = named_dim(call)
    if part is None or not cutting_axes(part.layout, {dim}):
        return call.op

    def compute(local: torch.Tensor, _: int, index: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        size = local.shape[dim]
        local_index, is_here = owned(index, part, dim)
        local_index = local_index.masked_fill_(~is_here, size)
        rest = list(local.shape)
        rest[dim] = 1
        longer: torch.Tensor = call.op(
            torch.cat((local, local.new_zeros(rest)), dim), dim, local_index, *args, **kwargs
        )
        written = longer.narrow(dim, 0, size)
        return local.copy_(written) if call.facts.mutated else written.clone(memory_format=torch.contiguous_format)

    return compute


def index_write(call: OpCall) -> Sequence[Signature]:
    """index_add, index_copy, index_fill, index_reduce: rows of `source`, or a value, at places along one dim."""
    name = call.facts.name.removesuffix("_")
    dim, num_dims = named_dim(call), len(call.output_shape)
    signatures = [all_replicated(call)]
    source = call.operands[2] if len(call.operands) > 2 else None
    has_rows = name != "aten.index_fill"
    if call.operands[0] is None or (has_rows and (source is None or len(source.shape) != num_dims)):
        return signatures
    others = [_WHOLE] * (len(call.operands) - 1)
    for other in range(num_dims):
        if other != dim:
            rows = [_WHOLE, Shard(other)] if has_rows else others
            signatures.append(Signature.of((Shard(other), *rows), Shard(other)))
        elif name != "aten.index_reduce":
            signatures.append(Signature.of((Shard(dim), *others), Shard(dim)))
    if name == "aten.index_copy":
        signatures += _copied(call)
    if name == "aten.index_add" and can_be_summed(call) and num_dims:
        signatures.append(Signature.of((_SUM, _WHOLE, _SUM), _SUM))
        if call.operands[1] is not None and call.operands[1].shape:
            signatures.append(Signature.of((_SUM, Shard(0), Shard(dim)), _SUM))
    return signatures


def localize_index_write(call: OpCall, propagation: Propagation) -> Compute:
    part = _written_part(call, propagation)
    dim = named_dim(call)
    if part is None or not cutting_axes(part.layout, {dim}):
        return call.op

    def compute(local: torch.Tensor, _: int, index: torch.Tensor, value: Any, **kwargs: Any) -> torch.Tensor:
        local_index, is_here = owned(index.reshape(-1), part, dim)
        if isinstance(value, torch.Tensor) and value.ndim:
            value = value.index_select(dim, is_here.nonzero().view(-1))
        written: torch.Tensor = call.op(local, dim, local_index[is_here], value, **kwargs)
        return written

    return compute


def index_put(call: OpCall) -> Sequence[Signature]:
    signatures = [all_replicated(call)]
    indices = call.argument("indices")
    num_dims, whole = len(call.output_shape), [_WHOLE] * (len(call.operands) - 2)
    if call.operands[0] is None:
        return signatures
    if not are_places(indices):
        return [*signatures, *_masked(call, indices)]
    where = index_map(num_dims, indices)
    values_shape = call.argument("values").shape
    for dim, position in where.kept.items():
        values = _values_along(values_shape, where, position, call.operand.shape[dim], num_dims)
        signatures.append(Signature.of((Shard(dim), *whole, values), Shard(dim)))
    signatures += [Signature.of((Shard(dim), *whole, _WHOLE), Shard(dim)) for dim in where.indexed]
    if not call.argument("accumulate", False):
        return signatures + _copied(call)
    if can_be_summed(call):
        signatures.append(Signature.of((_SUM, *whole, _SUM), _SUM))
        shapes = [index.shape for index in indices if index is not None]
        for dim, size in enumerate(where.shape):
            values = _values_along(values_shape, where, where.start + dim, size, num_dims)
            signatures.append(Signature.of((_SUM, *(where.along(shape, dim) for shape in shapes), values), _SUM))
    return signatures


def _values_along(values_shape: Sequence[int], where: IndexMap, dim: int, size: int, num_dims: int) -> Placement:
    """The placement of the values that cuts dim `dim` of the indexed result; broadcast along it, they are whole."""
    num_places = num_dims - len(where.indexed) + len(where.shape)
    values_dim = dim - (num_places - len(values_shape))
    return _WHOLE if values_dim < 0 or values_shape[values_dim] != size else Shard(values_dim)


def _masked(call: OpCall, indices: Sequence[torch.Tensor | None]) -> list[Signature]:
    """One mask over the first dims, and one value for all that it shows."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or call.argument("values").ndim:
        return []
    return [
        Signature.of((Shard(dim), Shard(dim) if dim < mask.ndim else _WHOLE, _WHOLE), Shard(dim))
        for dim in range(len(call.output_shape))
    ]


def localize_index_put(call: OpCall, propagation: Propagation) -> Compute:
    part = _written_part(call, propagation)
    indices = call.argument("indices")
    if part is None or not are_places(indices):
        return call.op
    where = index_map(len(part.shape), indices)
    cut_dims = [dim for dim in where.indexed if cutting_axes(part.layout, {dim})]
    if not cut_dims:
        return call.op
    num_index_dims = len(where.shape)
    index_dims = tuple(range(where.start, where.start + num_index_dims))

    def compute(
        local: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        local_indices, masks = list(indices), []
        for dim in cut_dims:
            index = local_indices[dim]
            assert index is not None
            local_indices[dim], is_here = owned(index, part, dim)
            masks.append(is_here)
        # The places may be cut as well, where what is written adds up.
        shape = broadcast_shape(*[local_index.shape for local_index in local_indices if local_index is not None])
        mask = reduce(and_, masks).expand(shape)
        rest = [size for dim, size in enumerate(local.shape) if dim in where.kept]
        full = [*rest[: where.start], *shape, *rest[where.start :]]
        # The entries in a row, and of those the ones that are this rank's.
        chosen = values.expand(full).movedim(index_dims, tuple(range(num_index_dims)))[mask].movedim(0, where.start)
        rows = [None if local_index is None else local_index.expand(shape)[mask] for local_index in local_indices]
        written: torch.Tensor = call.op(local, rows, chosen, *args, **kwargs)
        return written

    return compute


def put(call: OpCall) -> Sequence[Signature]:
    """Places count through the flattened whole: it is not cut."""
    signatures = [all_replicated(call)]
    if call.operands[0] is None or not can_be_summed(call):
        return signatures
    if not call.argument("accumulate", False):
        return signatures + _copied(call)
    signatures.append(Signature.of((_SUM, _WHOLE, _SUM), _SUM))
    index, source = call.operands[1], call.operands[2]
    # There are as many places as values, but they may be shaped differently.
    if index is not None and source is not None and len(index.shape) == len(source.shape) == 1:
        signatures.append(Signature.of((_SUM, Shard(0), Shard(0)), _SUM))
    return signatures


def _written_part(call: OpCall, propagation: Propagation) -> Spec | None:
    return None if call.operands[0] is None else operand_part(call, propagation, 0)


_SCATTER = Rule(scatter, localize_scatter, takes_blocks=False, reads_numbers=True)
_INDEX_WRITE = Rule(index_write, localize_index_write, takes_blocks=False)
_INDEX_PUT = Rule(index_put, localize_index_put, takes_blocks=False)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten.scatter", "aten.scatter_add", "aten.scatter_reduce"), _SCATTER),
    **dict.fromkeys(("aten.index_add", "aten.index_copy", "aten.index_fill", "aten.index_reduce"), _INDEX_WRITE),
    **dict.fromkeys(("aten._index_put_impl", "aten._unsafe_index_put", "aten.index_put"), _INDEX_PUT),
    "aten.put": Rule(put),
}
